"""Everything the console can do, without a front end: the command line and the dashboard both call this."""
