"""Many runs side by side: training them, storing them, and statistics over seeds."""
