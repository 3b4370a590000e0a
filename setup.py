"""Packaging: ``megatron.pipeline`` beside pip's ``megatron.core``, with ``patches/`` as ``megatron.pipeline.patches``."""

from setuptools import find_namespace_packages, setup

setup(
    name="megatron-pipeline",
    version="0.1.0",
    description="Zero-bubble and memory-controlled pipeline schedules for megatron-core, without a fork",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=[*find_namespace_packages(include=["megatron.pipeline", "megatron.pipeline.*"]), "megatron.pipeline.patches"],
    package_dir={"megatron.pipeline.patches": "patches"},
    package_data={"megatron.pipeline.view": ["web/*"], "megatron.pipeline.serve": ["web/*"]},
    install_requires=[
        "torch>=2.11,<2.14",
        "megatron-core>=0.14,<0.17",  # releases that scripts/check_core_versions.py trains with
        "numpy>=1.26,<3",
        "numba>=0.61,<0.70",  # compiles the planner's inner loops
        "ortools~=9.11",  # exact optima of small instances
        "einops~=0.8",
        "psutil>=5.9",  # megatron-core's checkpoint writer hangs without it
        "PyYAML~=6.0",
        "tensorboard~=2.15",
        "rich>=13,<16",
        "matplotlib~=3.8",
        "starlette>=0.40,<2",  # mpipe serve, on
        "uvicorn>=0.30,<1",
    ],
    extras_require={
        # NVIDIA's apex is detected by its fused_weight_gradient_mlp_cuda and is not on pip, so it is no extra.
        "transformer-engine": ["transformer-engine[pytorch]~=2.3"],
        "dev": ["pytest", "hypothesis", "ruff", "mypy", "types-PyYAML", "playwright"],
    },
    entry_points={"console_scripts": ["mpipe=megatron.pipeline.cli:main"]},
)
