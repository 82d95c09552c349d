"""The operations console for DFlash drafter training: a command line and a dashboard over one core."""

__version__ = "0.1.0"
