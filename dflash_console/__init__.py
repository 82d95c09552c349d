"""The operations console for DFlash drafter training: a command line and a dashboard over one core."""

import warnings

__version__ = "0.1.0"

# cryptography 51 warns where asyncssh 2.24 names DSA keys: seen by every user, of use to none of them. It has to
# be said before the first import of asyncssh, which each process of ours does later than this.
warnings.filterwarnings("ignore", message="DSA is deprecated", module=r"asyncssh\.")
