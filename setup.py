"""Packaging: ``megatron.pipeline`` beside pip's ``megatron.core``, with ``patches/`` as ``megatron.pipeline.patches``."""

import re
from pathlib import Path

from setuptools import find_namespace_packages, setup

ROOT = Path(__file__).parent
[VERSION] = re.findall(r'^__version__ = "(.+)"$', (ROOT / "megatron/pipeline/__init__.py").read_text(encoding="utf-8"), re.M)
# Directories that have no Python, such as costmodel/devices, are packages of the namespace, too: each brings what it holds.
URL = ""  # of the repository, once it is public: PyPI's page then leads there
PACKAGES = find_namespace_packages(include=["megatron.pipeline", "megatron.pipeline.*"], exclude=["*.__pycache__"])


def for_pypi(text: str) -> str:
    """README for PyPI, where no file is beside it: links and pictures lead to ``URL``; where there is none they go."""
    if not URL:
        text = re.sub(r"!\[[^]]*\]\((?!https?:)[^)]*\)\n*", "", text)
        return re.sub(r"\[([^]]*)\]\((?!https?:|#)[^)]*\)", r"\1", text)
    text = re.sub(r"(!\[[^]]*\]\()(?!https?:)", rf"\1{URL}/raw/main/", text)
    return re.sub(r"((?<!!)\[[^]]*\]\()(?!https?:|#)", rf"\1{URL}/blob/main/", text)


setup(
    name="megatron-pipeline",
    version=VERSION,
    description="Zero-bubble and memory-controlled pipeline schedules for megatron-core, without a fork",
    long_description=for_pypi((ROOT / "README.md").read_text(encoding="utf-8")),
    keywords="megatron, megatron-core, pipeline parallelism, zero bubble, schedules, LLM training, pretraining",
    project_urls={"Source": URL, "Documentation": f"{URL}/tree/main/docs", "Changelog": f"{URL}/blob/main/CHANGELOG.md"}
    if URL
    else {},
    long_description_content_type="text/markdown",
    author="megatron-pipeline developers",
    license="Apache-2.0",
    license_files=["LICENSE"],
    classifiers=[
        "Development Status :: 4 - Beta",
        "Environment :: Console",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Topic :: System :: Distributed Computing",
    ],
    python_requires=">=3.11",
    packages=[*PACKAGES, "megatron.pipeline.patches"],
    package_dir={"megatron.pipeline.patches": "patches"},
    package_data={"": ["py.typed", "*.json", "*.html", "*.css", "*.js", "*.svg"]},
    # What planning needs. Minimums alone: an environment keeps the torch and megatron-core that it has, and a run warns of
    # releases that are not tested.
    install_requires=[
        "numpy>=1.26",
        "numba>=0.61",  # compiles the planner's inner loops
        "PyYAML>=6.0",
    ],
    extras_require={
        "train": [
            "torch>=2.11",
            "megatron-core>=0.16",
            "einops>=0.8",
            "psutil>=5.9",  # megatron-core's checkpoint writer hangs without it
            "tensorboard>=2.15",
        ],
        "pictures": ["matplotlib>=3.8", "starlette>=0.40", "uvicorn>=0.30"],  # PNG files, and mpipe serve
        # NVIDIA's apex is detected by its fused_weight_gradient_mlp_cuda and is not on pip, so it is no extra.
        "transformer-engine": ["transformer-engine[pytorch]>=2.8"],
        "scripts": ["tree-sitter-bash[core]>=0.23"],  # mpipe memory --config train.sh
        "completion": ["shtab>=1.7"],  # mpipe --print-completion
        "docs": ["mkdocs-material==9.8.1"],  # make docs
        # ortools: the optima that tests compare plans with.
        "dev": [
            *("pytest", "pytest-timeout", "pytest-xdist", "hypothesis", "ortools", "ruff", "mypy", "import-linter"),
            *("types-PyYAML", "playwright", "build", "pybind11", "shtab", "rich", "tree-sitter-bash[core]"),
        ],
    },
    entry_points={"console_scripts": ["mpipe=megatron.pipeline.cli:main"]},
)
