"""How fast a model is on this machine, measured through the same engine that users get.

    prompts, scenarios, event_loop, values <- throughput, clients, profile <- session    session measures what its settings say and makes a Report
    values <- report_file, comparison, table, svg, page                                  a Report on its way to disk, terminal and browser
    arguments, command                                                                   `edgeinfer bench`
"""
