"""How families of models write calls of tools: a small parser for each way, and in `edgeinfer.runtime.tool_formats.table` who uses which."""
