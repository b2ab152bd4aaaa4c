"""Other engines that read what was measured here: cost tables and calibration temperatures."""

FORMATS = ("sglang", "tensorrt-llm")
"""As `--format` names them."""
