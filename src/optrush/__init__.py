"""optrush: train large language models as efficiently as the hardware allows, and prove it."""

__version__ = "0.1.0"
