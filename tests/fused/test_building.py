"""The kernels for a CPU are built where they can be, once, and whole."""

from __future__ import annotations

import ctypes
import os
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.fused.networks import convolutions, images, trained
from tests.toys import assert_identical

from ocnopt.fused.native import binding, build
from ocnopt.fused.native.actor import NativeActor

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="the networks are on the GPU"),
    pytest.mark.skipif(isinstance(binding.library(), str), reason=str(binding.library())),
]


@pytest.fixture
def anew(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[[], str | None]]:
    """Look for the kernels again, with an empty cache; why there are none?"""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("CC", raising=False)

    def why() -> str | None:
        binding._library.cache_clear()
        return binding.why_not(torch.float32)

    binding._library.cache_clear()
    yield why
    binding._library.cache_clear()


def kept(tmp_path: Path) -> list[Path]:
    return list((tmp_path / "cache" / "ocnopt" / "kernels").iterdir())


def _not_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build.subprocess, "run", lambda *_, **__: pytest.fail("built again"))


def test_they_are_built_once_and_whole(
    anew: Callable[[], str | None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert anew() is None
    (library,) = kept(tmp_path)
    assert stat.S_IMODE(library.parent.stat().st_mode) == 0o700
    whole = library.read_bytes()
    for damaged in (b"", whole[:3000], whole[:-1], whole[:5000] + b"?" + whole[5001:]):
        library.unlink()  # this process runs what is in it
        library.write_bytes(damaged)
        assert anew() is None
        assert library.read_bytes()[:5001] == whole[:5001]
    with monkeypatch.context() as context:
        _not_again(context)
        assert anew() is None
    for path in (library, library.parent):  # to which others can write
        mode = path.stat().st_mode
        path.chmod(0o777)
        with monkeypatch.context() as context:
            context.setattr(build, "_built", lambda *_: (_ for _ in ()).throw(OSError("built")))
            with pytest.warns(RuntimeWarning, match="cannot be built: built; OCNOpt goes on without them"):
                assert anew() == "kernels for a CPU cannot be built: built"
        path.chmod(mode)
    monkeypatch.setattr(build.os, "getuid", lambda: 12345)  # somebody else's
    assert not build._is_ours(library)


def test_they_are_kept_whatever_others_may_do(anew: Callable[[], str | None], monkeypatch: pytest.MonkeyPatch) -> None:
    before = os.umask(0o002)
    try:
        assert anew() is None
    finally:
        os.umask(before)
    _not_again(monkeypatch)
    assert anew() is None


def test_a_scratch_folder_where_nothing_may_be_executed(
    anew: Callable[[], str | None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = ctypes.CDLL

    def load(path: str) -> ctypes.CDLL:
        if not path.startswith(str(tmp_path / "cache")):
            raise OSError("failed to map segment from shared object")
        return real(path)

    monkeypatch.setattr(build.ctypes, "CDLL", load)
    assert anew() is None
    monkeypatch.setattr(build, "_cache_folder", lambda: None)
    with pytest.warns(RuntimeWarning, match="failed to map segment"):
        assert anew() is not None


def test_threads_build_one(anew: Callable[[], str | None], monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[int] = []
    monkeypatch.setattr(build, "load", lambda: built.append(1) or time.sleep(0.2) or _none())
    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(lambda _: binding.why_not(torch.float32), range(4))) == {"none"}
    assert built == [1]


def _none() -> None:
    raise build.Unavailable("none")


def test_for_another_processor_they_are_others(
    anew: Callable[[], str | None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One whose vectors are shorter, or whose compiler knows nothing of it. Homes are shared between machines."""
    compiler = tmp_path / "cc"
    compiler.write_text('#!/bin/sh\ncase "$*" in *-march=native*) exit 1;; esac\nexec cc "$@"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    assert anew() is None
    assert binding.kernels().ocnopt_lanes() == 4
    plain = trained(convolutions(), images(9), fused=False, rank=7, feedback="nonlinear")
    ours = trained(convolutions(), images(9), fused=True, rank=7, feedback="nonlinear")
    torch.testing.assert_close(ours, plain, rtol=5e-5, atol=2e-6)
    assert len(kept(tmp_path)) == 1
    keys = {build._key([["cc"]]), build._key([["gcc"]])}
    with monkeypatch.context() as context:
        context.setattr(Path, "read_bytes", lambda self: b"flags : none")
        keys |= {build._key([["cc"]])}
        context.setattr(build, "FLAGS", ())
        keys |= {build._key([["cc"]])}
    assert len(keys) == 4


@pytest.mark.usefixtures("anew")
@pytest.mark.parametrize("place", ["a file", "no home", "relative"])
def test_where_nothing_can_be_kept(
    place: str, tmp_path: Path, acted: list[NativeActor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if place == "a file":
        (tmp_path / "cache").write_text("no folder")
    else:
        monkeypatch.setenv("XDG_CACHE_HOME", "cache")
        monkeypatch.setattr(Path, "home", _no_home)
    trained(convolutions(), images(), fused=True)
    assert acted
    assert not (tmp_path / "cache").is_dir()


def _no_home() -> Path:
    raise RuntimeError("Could not determine home directory.")


@pytest.mark.usefixtures("anew")
@pytest.mark.parametrize(
    ("compiler", "why"),
    [
        ("/nowhere/cc", "kernels for a CPU cannot be built: .*/nowhere/cc"),
        ("false", "kernels for a CPU cannot be built: false: it does not say why"),
        (f"{sys.executable} -c 1/0", "kernels for a CPU cannot be built: .*: Traceback"),
        ("true", "kernels for a CPU cannot be built: true: it does not say why"),
        ('gcc "', "kernels for a CPU cannot be built: No closing quotation"),
    ],
)
def test_a_compiler_that_does_not(compiler: str, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", compiler)
    with pytest.warns(RuntimeWarning, match=f"{why}.*; OCNOpt goes on without them"):
        _said(why)


def test_a_compiler_that_fails_is_asked_once(anew: Callable[[], str | None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also by who turns warnings into errors, as these tests do."""
    monkeypatch.setenv("CC", "false")
    with pytest.raises(RuntimeWarning, match="OCNOpt goes on without them"):
        anew()
    _not_again(monkeypatch)
    assert binding.why_not(torch.float32) is not None


@pytest.mark.usefixtures("anew")
def test_a_compiler_that_never_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(command: list[str], **_: Any) -> None:
        raise subprocess.TimeoutExpired(command, 60)

    monkeypatch.setattr(build.subprocess, "run", run)
    with pytest.warns(RuntimeWarning, match="timed out after 60 seconds; OCNOpt goes on without them"):
        _said("timed out after 60 seconds")


def test_which_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(build.shutil, "which", lambda name: f"/usr/bin/{name}" if name != "cc" else None)
    assert build._compilers() == [["/usr/bin/gcc"], ["/usr/bin/clang"]]
    monkeypatch.setenv("CC", "ccache my-cc")
    assert build._compilers() == [["ccache", "my-cc"]]


@pytest.mark.usefixtures("anew")
def test_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build.shutil, "which", lambda _: None)
    _said("there is no C compiler to build kernels for a CPU")


@pytest.mark.usefixtures("anew")
def test_another_platform(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build.sys, "platform", "win32")
    _said("kernels for a CPU are built on Linux, not on 'win32'")


def test_a_locale_that_has_few_letters(tmp_path: Path) -> None:
    given = {
        **os.environ,
        "LC_ALL": "C",
        "PYTHONCOERCECLOCALE": "0",
        "PYTHONUTF8": "0",
        "XDG_CACHE_HOME": str(tmp_path),
    }
    code = "import torch; from ocnopt.fused.native import binding; print(binding.why_not(torch.float32))"
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, **given}, capture_output=True, text=True)
    assert done.stdout == "None\n", done.stderr


def _said(why: str) -> None:
    """Where they are asked for, at every step."""
    with pytest.raises(RuntimeError, match=f"^fused=True cannot be had for '0.weight': .*{why}"):
        trained(convolutions(), images(), fused=True)
    assert_identical(trained(convolutions(), images()), trained(convolutions(), images(), fused=False))
