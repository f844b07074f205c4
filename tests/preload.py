"""Imported once by the server that forks the ranks."""

import fsdp_qlora.describe
import fsdp_qlora.export
import fsdp_qlora.parallelize
import fsdp_qlora.trainer
import fsdp_qlora.verify
import fsdp_qlora.weights
import train  # noqa: F401
