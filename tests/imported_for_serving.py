"""What `dspark serve` imports, for the process that tests fork servers off."""

import dspark.cli.serve
import dspark.recipes.llm
import dspark.recipes.serve
import dspark.server.run  # noqa: F401
