"""`dflash-engine selfcheck`: this engine on this machine against the public packages' recorded outputs."""
