"""Extended tests: their files, the source folders they belong to, and the ones that a change affects.

pytest skips extended tests in a folder, and runs them if they are named. `python -m tests.support.extended` prints the
tests affected by the change since the main branch. `make test-changed` runs them.
"""

from __future__ import annotations

import subprocess
from collections.abc import Collection
from fnmatch import fnmatch
from pathlib import Path

# Test files and the patterns of source paths they belong to. An asterisk matches any number of folders.
EXTENDED = {
    "tests/test_docs.py": ("README.md", "docs/*.md", "examples/*", "lookahead/__init__.py", "lookahead/cli/*"),
    # Benchmarks
    "tests/test_bench_kernel.py": ("bench/*", "kernels/*"),
    "tests/test_bench_command.py": ("lookahead/cli/*", "lookahead/decoding/*"),
    "tests/test_bench_runs.py": ("bench/*",),
    "tests/test_llm_bench.py": ("bench/*",),
    "tests/test_ablation.py": ("bench/*", "lookahead/drafting/*"),
    "tests/test_tables.py": ("lookahead/cli/*",),
    # Training
    "tests/test_head_training.py": ("lookahead/plugins/heads/*",),
    "tests/test_train_cli.py": ("lookahead/plugins/heads/*", "lookahead/cli/*"),
    # CUDA graphs on a CPU, and kernels that are interpreted or compiled ahead of time
    "tests/test_graphs.py": ("lookahead/*/cuda_graphs.py", "lookahead/*/tree_pass.py"),
    "tests/test_recording.py": ("lookahead/*/cuda_graphs.py",),
    "tests/test_fake_gpu.py": (
        "kernels/*",
        "lookahead/backend/*",
        "lookahead/model/cache.py",
        "lookahead/*/engine.py",
        "tests/support/fake_gpu.py",
    ),
    "tests/test_kernels.py": ("kernels/*", "tests/interpreted_kernels.py"),
    "tests/test_products.py": ("kernels/*",),
    "tests/test_kernel_self_test.py": ("kernels/*", "lookahead/*/kernel_trial.py"),
    # Models beside causal language models with dense layers
    "tests/test_encoder_decoder_*.py": (
        "lookahead/backend/*",
        "lookahead/decoding/*",
        "lookahead/engine/*",
        "lookahead/model/*",
        "lookahead/plugins/encoder_decoder/*",
        "lookahead/*/scheduler.py",
        "lookahead/*/shared_rows.py",
    ),
    "tests/test_block_formats.py": ("kernels/*", "lookahead/loading/gguf*", "lookahead/*/quantized*.py"),
    "tests/test_gguf_experts.py": ("kernels/*", "lookahead/loading/gguf*", "lookahead/loading/quantized*"),
    "tests/test_gguf_loading.py": ("kernels/block*", "lookahead/loading/*"),
    "tests/test_gguf_families.py": ("kernels/*", "lookahead/loading/gguf*", "lookahead/*/quantized*.py"),
    "tests/test_foreign_layers.py": ("lookahead/backend/*", "lookahead/model/*"),
    "tests/test_images.py": ("lookahead/backend/*", "lookahead/decoding/*", "lookahead/model/*"),
    "tests/test_quantized.py": (
        "kernels/*",
        "lookahead/backend/*",
        "lookahead/*/quantized*.py",
        "lookahead/*/foreign_layers.py",
    ),
    "tests/test_transcribe.py": ("lookahead/cli/*", "lookahead/decoding/transcription.py", "lookahead/documents/*"),
    "tests/test_serve_media.py": (
        "lookahead/decoding/prompt_reading.py",
        "lookahead/loading/*",
        "lookahead/serving/*",
    ),
    "tests/test_serve_speech.py": (
        "lookahead/decoding/transcription.py",
        "lookahead/documents/sound_files.py",
        "lookahead/serving/*",
    ),
    "tests/test_speech.py": (
        "lookahead/backend/*",
        "lookahead/decoding/*",
        "lookahead/model/*",
        "lookahead/plugins/encoder_decoder/*",
    ),
    "tests/test_loaded_models.py": ("lookahead/backend/*", "lookahead/model/*"),
    "tests/test_quantized_families.py": ("kernels/*", "lookahead/backend/*", "lookahead/model/*"),
    "tests/test_declared_families.py": ("kernels/*", "lookahead/backend/*", "lookahead/model/*"),
    "tests/test_learned_positions.py": ("kernels/*", "lookahead/backend/*", "lookahead/model/*"),
    "tests/test_eager_attention.py": ("kernels/*", "lookahead/backend/*", "lookahead/model/*"),
    "tests/test_latents.py": ("kernels/*", "lookahead/backend/*", "lookahead/model/*"),
    "tests/test_states.py": ("kernels/*", "lookahead/backend/*", "lookahead/model/*"),
    "tests/test_tree_mixers.py": ("kernels/*", "lookahead/backend/*", "lookahead/model/*"),
    "tests/test_wrapped_decoders.py": ("lookahead/backend/*", "lookahead/model/*"),
    "tests/test_adapters.py": ("lookahead/backend/*", "lookahead/*/enable.py", "lookahead/model/model_*"),
    # Sources of drafts and modes that are asked for
    "tests/test_beams.py": ("lookahead/*/beam*", "lookahead/backend/*", "lookahead/model/*"),
    "tests/test_branch.py": ("lookahead/drafting/*", "lookahead/*/jacobi.py", "ngram/window.py"),
    "tests/test_chain_proposer.py": ("ngram/*", "lookahead/plugins/*", "lookahead/*/chain_lengths.py"),
    "tests/test_draft_cost.py": ("lookahead/drafting/*", "lookahead/*/draft_model.py"),
    "tests/test_draft_model.py": ("lookahead/drafting/*", "lookahead/plugins/draft_models/*"),
    "tests/test_heads_drafting.py": ("lookahead/plugins/heads/*", "lookahead/proposers/*"),
    "tests/test_memory_file.py": ("ngram/*", "lookahead/*/memory_files.py"),
    "tests/test_mtp.py": ("lookahead/plugins/heads/*", "lookahead/model/*"),
    "tests/test_rejection.py": ("lookahead/verification/*", "lookahead/engine/*"),
    "tests/test_summary_options.py": ("lookahead/cli/*", "lookahead/summarization/*"),
    # Processes and workers
    "tests/test_cache_folders.py": ("lookahead/utils/*",),
    "tests/test_doctor.py": ("lookahead/*/diagnosis.py", "lookahead/cli/doctor.py"),
    "tests/test_serve_libraries.py": ("lookahead/serving/*", "tests/clients.txt"),
    "tests/test_serve_process.py": ("lookahead/cli/*", "lookahead/serving/*"),
    "tests/test_verdict_files.py": ("lookahead/*/verdict_files.py", "lookahead/utils/*"),
    "tests/test_changed_results.py": ("lookahead/jobs/*",),
    "tests/test_cli_process.py": ("lookahead/cli/*", "lookahead/documents/*", "lookahead/jobs/*"),
    "tests/test_packaging.py": ("MANIFEST.in", "kernels/*", "lookahead/*__init__.py", "lookahead/__*.py", "ngram/*"),
    "tests/test_platforms.py": ("kernels/*", "lookahead/documents/*", "lookahead/utils/*", "lookahead/*/pool_files.py"),
    "tests/test_ray*.py": ("lookahead/jobs/*", "lookahead/summarization/*"),
    "tests/test_shared_files.py": ("lookahead/jobs/*", "lookahead/utils/*", "lookahead/proposers/*_file*.py"),
    # Libraries that `make test-all` installs
    "tests/test_foreign_quantizers.py": ("lookahead/*/layer_probes.py", "lookahead/*/foreign_layers.py"),
    "tests/test_tensor_parallel.py": ("lookahead/*/tensor_parallel.py", "lookahead/*/linears.py"),
}
# Patterns of paths that every test belongs to.
SHARED = (".ci/*", "Makefile", "constraints.txt", "pyproject.toml", "tests/conftest.py", "tests/support/*")

ROOT = Path(__file__).resolve().parent.parent.parent


def changed_files(root: Path) -> list[str] | None:
    """The files changed since the branch left the main branch; on the main branch, since the previous commit.

    Args:
        root: The root of a repository.

    Returns:
        Paths from the root; None if the history is missing or too short.
    """
    head = _git(root, "rev-parse", "HEAD")
    bases = [_git(root, "merge-base", "HEAD", branch) for branch in ("origin/main", "main")]
    base = next((base for base in bases if base not in (None, head)), "HEAD~1")
    changes = _git(root, "diff", "--name-only", "--no-renames", "-z", base)
    return None if changes is None else [path for path in changes.split("\0") if path]


def _git(root: Path, *arguments: str) -> str | None:
    try:
        run = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, encoding="utf-8")
    except FileNotFoundError:  # no git
        return None
    return run.stdout.strip() if run.returncode == 0 else None


def touched_tests(changes: Collection[str] | None) -> list[str]:
    """The extended tests that changed themselves or belong to a changed file; all of them for `None`.

    Args:
        changes: Paths from the root.
    """
    return sorted(
        test
        for pattern, rooms in EXTENDED.items()
        for test in (str(path.relative_to(ROOT)) for path in ROOT.glob(pattern))
        if changes is None or any(fnmatch(path, room) for path in changes for room in (test, *rooms, *SHARED))
    )


if __name__ == "__main__":
    print(*touched_tests(changed_files(ROOT)))
