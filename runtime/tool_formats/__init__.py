"""How families of models write calls of tools: one small parser for each way, and a table of who uses which (`edgeinfer.runtime.tool_formats.table`)."""
