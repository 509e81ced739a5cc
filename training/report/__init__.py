"""report.html: read the folder of a run and show it on one page that needs no network."""
