"""How fast a model is on this machine, measured through the same engine that users get.

    prompts, scenarios, values <- throughput, clients, profile <- session       measuring; session runs a plan and makes a Report
    values <- report_file, comparison, table, page                              a Report on its way to disk, terminal and browser
    arguments, command                                                          `edgeinfer bench`
"""
