"""Many runs side by side: where they are kept, doing them, and statistics over seeds."""
