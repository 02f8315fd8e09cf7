"""Set up JAX on the CPU, and hypothesis, for all tests."""

import os
import tempfile
from pathlib import Path

import hypothesis
import jax

jax.config.update("jax_platforms", os.environ.get("BAAR_JAX_TEST_PLATFORM", "cpu"))
# All tests, and the programs that they start, share one cache of compiled functions.
CACHE = str(Path(tempfile.gettempdir()) / "baar_jax_compiled")
CACHE = os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", CACHE)
jax.config.update("jax_compilation_cache_dir", CACHE)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)
# Arrays with different numbers of axes are an error, so that a missing [:, None] does not
# broadcast silently.
jax.config.update("jax_numpy_rank_promotion", "raise")

hypothesis.settings.register_profile("repeatable", deadline=None, derandomize=True)
hypothesis.settings.load_profile("repeatable")
