"""How fast a model is on this machine, measured through the same engine that users get; or how fast a server is, over HTTP.

    prompts, scenarios, event_loop, values <- throughput, clients, profile <- session    session measures what its settings say and makes a Report
    scenarios, clients <- http_clients <- url_session                                    the scenarios alone, at a server
    values <- report_file, comparison, table, svg, page                                  a Report on its way to disk, terminal and browser
    arguments, command                                                                   `edgeinfer bench`
"""
