"""Make the NVIDIA libraries that torch's CUDA build must find, with every symbol it takes from
them.

    python make_stubs.py SITE_PACKAGES OUT

So torch's wheel is enough, without the nvidia-* packages (2.7 GB). What our programs really call is
in runtime/: it is OUT/libphantom.so, made before, and preloaded, so it is found first. A function
of a stub that is called after all says so, by name, and fails.
"""

import re
import subprocess
import sys
from collections import defaultdict
from importlib.metadata import version
from pathlib import Path

RUNTIME = "libphantom.so"
# Those of the system, which are really there.
SYSTEM = re.compile(r"ld-linux|lib(c|m|dl|rt|pthread|stdc\+\+|gcc_s|gomp|z)\.so")
# How the symbols of libraries begin that do not version them.
PREFIXES = {
    "libcudnn": "cudnn",
    "libcusparseLt": "cusparseLt",
    "libnccl": "nccl",
    "libcufile": "cuFile",
    "libnvshmem": "nvshmem",
    "libcupti": "cupti",
    "libcuda.": "cu",
}
# Called in every run, and nothing is lost when they do nothing: profiling, versions.
HARMLESS = re.compile(r"cupti|nvshmem|\w+GetVersion$|nvrtcVersion$")
# These answer with a text.
TEXTS = re.compile(r"\w*Get(Last)?(Error|Status)(String|Name)?$")
NOT_SUPPORTED = 801  # cudaErrorNotSupported; an error in the other libraries too

FAILING = """
#include <stdio.h>
static long lacks(const char *symbol, int *said) {
    if (!*said) fprintf(stderr, "phantom: the stand-in lacks symbol %%s (%(library)s), "
        "needed by torch %(torch)s: add it to stand_in/runtime\\n", symbol);
    *said = 1;
    return %(status)d;
}
"""


def dynamic_libraries(site: Path) -> list[Path]:
    """torch's own and the one of bitsandbytes for the same CUDA."""
    return [*site.glob("torch/lib/*.so*"), *site.glob("bitsandbytes/libbitsandbytes_cuda13*.so")]


def needed_libraries(libraries: list[Path]) -> set[str]:
    """The names that have to be found at load and are neither torch's own nor the system's."""
    own = {library.name for library in libraries}
    names = {"libcuda.so.1", "libnvidia-ml.so.1"}  # opened by name
    for library in libraries:
        lines = subprocess.run(
            ["readelf", "-dW", library], capture_output=True, text=True, check=True
        ).stdout
        names |= set(re.findall(r"\(NEEDED\).*\[(.+)\]", lines))
    return {name for name in names - own if not SYSTEM.match(name)}


def undefined_symbols(libraries: list[Path]) -> dict[str, set[str]]:
    """Version of the symbol ("" for none) -> names."""
    symbols: dict[str, set[str]] = defaultdict(set)
    for library in libraries:
        command = ["nm", "-D", "--undefined-only", library]
        for line in subprocess.run(
            command, capture_output=True, text=True, check=True
        ).stdout.splitlines():
            name, _, version_of_symbol = line.split()[-1].partition("@")
            symbols[version_of_symbol].add(name)
    return symbols


def defined_symbols(library: Path) -> set[str]:
    command = ["nm", "-D", "--defined-only", library]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    return {line.split()[-1] for line in lines}


def symbols_of(library: str, symbols: dict[str, set[str]]) -> tuple[str, set[str]]:
    """The version that a library gives its symbols, and their names."""
    stem = library.split(".so")[0]
    for version_of_symbol, names in symbols.items():
        if version_of_symbol == library or version_of_symbol.startswith(f"{stem}.so"):
            return version_of_symbol, names
    if stem.startswith("libnvshmem"):
        return "NVSHMEM", symbols["NVSHMEM"]
    prefix = next((prefix for start, prefix in PREFIXES.items() if library.startswith(start)), None)
    if prefix is None:
        return "", set()
    is_ours = re.compile(rf"{prefix}[A-Z]" if prefix == "cu" else prefix)
    return "", {
        name
        for name in symbols[""]
        if is_ours.match(name) and not (prefix == "cu" and "cuFile" in name)
    }


def stub_function(name: str) -> str:
    if TEXTS.match(name):
        return f'const char *{name}(void) {{ return "not supported by the stand-in for CUDA"; }}'
    if HARMLESS.match(name):
        return f"long {name}(void) {{ return 0; }}"
    return f'long {name}(void) {{ static int said; return lacks("{name}", &said); }}'


def make_stub(
    library: str, version_of_symbols: str, names: set[str], out: Path, torch: str
) -> None:
    source = out / f"{library}.c"
    script = out / f"{library}.map"
    names = names - defined_symbols(out / RUNTIME)
    head = FAILING % {"library": library, "torch": torch, "status": NOT_SUPPORTED}
    source.write_text(
        head + "\n".join(stub_function(name) for name in sorted(names) if name.isidentifier())
    )
    # torch opens libcuda.so.1 and looks into it alone, which includes what it is linked with.
    runtime = ["-Wl,--no-as-needed", f"-L{out}", f"-l:{RUNTIME}"]
    command = [
        "cc",
        "-shared",
        "-fPIC",
        "-w",
        f"-Wl,-soname,{library}",
        "-o",
        out / library,
        source,
        *runtime,
    ]
    if version_of_symbols:
        script.write_text(f"{version_of_symbols} {{ global: *; }};\n")
        command.append(f"-Wl,--version-script={script}")
    subprocess.run(command, check=True)
    source.unlink()
    script.unlink(missing_ok=True)


def main(site: Path, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    libraries = dynamic_libraries(site)
    symbols = undefined_symbols(libraries)
    for library in sorted(needed_libraries(libraries)):
        make_stub(library, *symbols_of(library, symbols), out, version("torch"))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
