"""The engine that trains and evaluates DFlash drafters; it runs on the hosts, never on the operator's screen."""

__version__ = "0.1.0"
