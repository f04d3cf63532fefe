"""What the package asks of torch and of the system below its models: memory, layout, device.

The folder knows nothing about clients or methods, and has the only private names of torch.
"""
