"""The report of a run as one HTML file: what is in it (one module for each figure), and the page that draws it.

`aiockpt.monitor.html.html_report` puts it together; `templates/` has the page, its style and its scripts.
"""
