"""The table of datasets: what each one is, which files hold it, where these are published and their
checksums.

A *form* is one way in which a dataset may lie on disk: file name patterns that must all be found in one
folder. The first form that is complete wins. A *remote* is one official file to download.

The UEA archive publishes no checksums of its zip files; these are checked by the sums inside the zip and by
the number of series that they hold (see ``load.fetch``).
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

from ocnopt.lab.data.dataset import Task


@dataclass(frozen=True)
class Remote:
    """An official file.

    Attributes:
        filename: its name on disk; kept as published.
        urls: the official address first, then mirrors that serve the same bytes.
        checksum: ``"sha256:…"`` or ``"md5:…"``; None where nobody publishes one.
        size: in bytes, to warn before a large download; None when unknown.
        folder: where it goes, below the data folder.
        members: files to take out of an archive, as (end of the path in the archive, path below the data
            folder). The archive itself is then deleted.
    """

    filename: str
    urls: tuple[str, ...]
    checksum: str | None
    folder: str
    size: int | None = None
    members: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Entry:
    """One row of the table.

    ``sizes`` counts the train, validation and test samples of the complete set; ``other_sizes`` are those
    of other releases that are complete as well. ``folders`` are names of subfolders that may hold the
    files, compared without case and punctuation.
    """

    name: str
    title: str
    task: Task
    sizes: tuple[int, int, int]
    input_shape: tuple[int, ...]
    classes: int
    licence: str
    homepage: str
    aliases: tuple[str, ...] = ()
    folders: tuple[str, ...] = ()
    forms: tuple[tuple[str, ...], ...] = ()
    remotes: tuple[Remote, ...] = ()
    other_sizes: tuple[tuple[int, int, int], ...] = ()

    @property
    def built_in(self) -> bool:
        """Made by a library or a formula, or comes along: no files to look for, nothing to fetch."""
        return not self.forms


_SKLEARN = "https://scikit-learn.org/stable/datasets/toy_dataset.html"

_IDX = (
    "train-images?idx3-ubyte",
    "train-labels?idx1-ubyte",
    "t10k-images?idx3-ubyte",
    "t10k-labels?idx1-ubyte",
)
_IDX_FORMS = (tuple(f"{p}.gz" for p in _IDX), _IDX)


def _idx_remotes(folder: str, bases: tuple[str, ...], sums: tuple[tuple[int, str], ...]) -> tuple[Remote, ...]:
    names = [f"{pattern.replace('?', '-')}.gz" for pattern in _IDX]
    return tuple(
        Remote(
            filename=name,
            urls=tuple(base + name for base in bases),
            checksum=f"sha256:{digest}",
            folder=folder,
            size=size,
        )
        for name, (size, digest) in zip(names, sums, strict=True)
    )


_MNIST = _idx_remotes(
    "mnist",
    ("https://ossci-datasets.s3.amazonaws.com/mnist/", "https://storage.googleapis.com/cvdf-datasets/mnist/"),
    (
        (9912422, "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609"),
        (28881, "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c"),
        (1648877, "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6"),
        (4542, "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6"),
    ),
)
_FMNIST = _idx_remotes(
    "fashion_mnist",
    (
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
        "https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion/",
    ),
    (
        (26421880, "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84"),
        (29515, "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845"),
        (4422102, "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073"),
        (5148, "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5"),
    ),
)
_SVHN_URL = "http://ufldl.stanford.edu/housenumbers/"
_SVHN = (
    Remote(
        filename="train_32x32.mat",
        urls=(_SVHN_URL + "train_32x32.mat",),
        checksum="sha256:435e94d69a87fde4fd4d7f3dd208dfc32cb6ae8af2240d066de1df7508d083b8",
        folder="svhn",
        size=182040794,
    ),
    Remote(
        filename="test_32x32.mat",
        urls=(_SVHN_URL + "test_32x32.mat",),
        checksum="sha256:cdce80dfb2a2c4c6160906d0bd7c68ec5a99d7ca4831afa54f09182025b6a75b",
        folder="svhn",
        size=64275384,
    ),
)


def _cifar_remote(classes: int, size: int, digest: str) -> tuple[Remote, ...]:
    name = f"cifar-{classes}-python.tar.gz"
    hosts = ("https://www.cs.toronto.edu/~kriz/", "https://cave.cs.toronto.edu/kriz/")
    return (
        Remote(
            filename=name,
            urls=tuple(h + name for h in hosts),
            checksum=f"sha256:{digest}",
            folder=f"cifar{classes}",
            size=size,
        ),
    )


# Both density sets come from one archive, that of Papamakarios et al. (2017), which FFJORD uses too.
_MAF = (
    Remote(
        filename="data.tar.gz",
        urls=("https://zenodo.org/records/1161203/files/data.tar.gz",),
        checksum="md5:9b9c9b0375315ad270eba4ce80c093ab",
        folder="maf",
        members=(
            ("gas/ethylene_CO.pickle", "gas/ethylene_CO.pickle"),
            ("miniboone/data.npy", "miniboone/data.npy"),
        ),
    ),
)


def _uea(
    name: str,
    short: str,
    title: str,
    sizes: tuple[int, int, int],
    shape: tuple[int, int],
    classes: int,
    licence: str,
    other_sizes: tuple[tuple[int, int, int], ...] = (),
) -> Entry:
    parts = ("TRAIN", "TEST")
    return Entry(
        name=name,
        title=title,
        task="classification",
        sizes=sizes,
        input_shape=shape,
        classes=classes,
        licence=licence,
        homepage=f"https://www.timeseriesclassification.com/description.php?Dataset={name}",
        aliases=(short,),
        folders=(name,),
        forms=(
            tuple(f"{name}_{p}.ts" for p in parts),
            tuple(f"{name}_{p}.ts.gz" for p in parts),
            (f"{name}.zip",),
            tuple(f"{name}_{p}.arff" for p in parts),
            tuple(f"{name}Dimension1_{p}.arff" for p in parts),
            (f"{name}*.tar.gz",),
        ),
        remotes=(
            Remote(
                filename=f"{name}.zip",
                urls=(
                    f"https://www.timeseriesclassification.com/aeon-toolkit/{name}.zip",
                    f"http://www.timeseriesclassification.com/Downloads/{name}.zip",
                ),
                checksum=None,
                folder=f"uea/{name}",
            ),
        ),
        other_sizes=other_sizes,
    )


_ENTRIES = (
    Entry(
        name="WINE",
        title="chemical analysis of wines",
        task="classification",
        sizes=(142, 0, 36),
        input_shape=(13,),
        classes=3,
        licence="CC BY 4.0",
        homepage=_SKLEARN,
    ),
    Entry(
        name="DIGITS",
        title="handwritten digits, 8x8",
        task="classification",
        sizes=(1438, 0, 359),
        input_shape=(1, 8, 8),
        classes=10,
        licence="CC BY 4.0",
        homepage=_SKLEARN,
    ),
    Entry(
        name="MNIST",
        title="handwritten digits",
        task="classification",
        sizes=(60000, 0, 10000),
        input_shape=(1, 28, 28),
        classes=10,
        licence="CC BY-SA 3.0 (as commonly stated)",
        homepage="http://yann.lecun.com/exdb/mnist/",
        folders=("mnist",),
        forms=_IDX_FORMS,
        remotes=_MNIST,
    ),
    Entry(
        name="FMNIST",
        title="articles of clothing",
        task="classification",
        sizes=(60000, 0, 10000),
        input_shape=(1, 28, 28),
        classes=10,
        licence="MIT",
        homepage="https://github.com/zalandoresearch/fashion-mnist",
        aliases=("FashionMNIST",),
        folders=("fashion_mnist", "fmnist"),
        forms=_IDX_FORMS,
        remotes=_FMNIST,
    ),
    Entry(
        name="SVHN",
        title="street view house numbers, cropped digits",
        task="classification",
        sizes=(73257, 0, 26032),
        input_shape=(3, 32, 32),
        classes=10,
        licence="non-commercial use only",
        homepage=_SVHN_URL,
        folders=("svhn",),
        forms=(("train_32x32.mat", "test_32x32.mat"),),
        remotes=_SVHN,
    ),
    Entry(
        name="CIFAR10",
        title="natural images, 10 classes",
        task="classification",
        sizes=(50000, 0, 10000),
        input_shape=(3, 32, 32),
        classes=10,
        licence="none stated; cite the authors",
        homepage="https://www.cs.toronto.edu/~kriz/cifar.html",
        folders=("cifar10",),
        forms=(("cifar-10-python.tar.gz",), ("cifar-10-batches-py",), ("cifar-10-python*.tar.?z",)),
        remotes=_cifar_remote(10, 170498071, "6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce"),
    ),
    Entry(
        name="CIFAR100",
        title="natural images, 100 classes",
        task="classification",
        sizes=(50000, 0, 10000),
        input_shape=(3, 32, 32),
        classes=100,
        licence="none stated; cite the authors",
        homepage="https://www.cs.toronto.edu/~kriz/cifar.html",
        folders=("cifar100",),
        forms=(("cifar-100-python.tar.gz",), ("cifar-100-python",), ("cifar-100-python*.tar.?z",)),
        remotes=_cifar_remote(100, 169001437, "85cd44d02ba6437773c5bbd22e183051d648de2e7d6b014e1ef29b855ba677a7"),
    ),
    _uea(
        name="SpokenArabicDigits",
        short="SpoAD",
        title="spoken digits, cepstral coefficients",
        sizes=(6599, 0, 2199),
        shape=(93, 13),
        classes=10,
        licence="CC BY 4.0",
        # The original UCI release has one more series in each part.
        other_sizes=((6600, 0, 2200),),
    ),
    _uea(
        name="ArticularyWordRecognition",
        short="ArtWR",
        title="tongue and lip movements of spoken words",
        sizes=(275, 0, 300),
        shape=(144, 9),
        classes=25,
        licence="none stated; cite the authors",
    ),
    _uea(
        name="CharacterTrajectories",
        short="CharT",
        title="pen movements of handwritten letters",
        sizes=(1422, 0, 1436),
        shape=(182, 3),
        classes=20,
        licence="CC BY 4.0",
    ),
    Entry(
        name="Circle",
        title="two concentric circles",
        task="density",
        sizes=(10000, 2000, 2000),
        input_shape=(2,),
        classes=0,
        licence="generated",
        homepage=_SKLEARN,
    ),
    Entry(
        name="Gas",
        title="gas sensors in mixtures of ethylene and CO",
        task="density",
        sizes=(852174, 94685, 105206),
        input_shape=(8,),
        classes=0,
        licence="CC BY 4.0",
        homepage="https://doi.org/10.5281/zenodo.1161203",
        folders=("gas",),
        forms=(
            ("ethylene_CO.pickle",),
            ("ethylene_CO.txt",),
            ("gas?sensor?array?under?dynamic?gas?mixtures.zip",),
            ("data.tar.gz",),
        ),
        remotes=_MAF,
    ),
    Entry(
        name="Miniboone",
        title="neutrino events",
        task="density",
        sizes=(29556, 3284, 3648),
        input_shape=(43,),
        classes=0,
        licence="CC BY 4.0",
        homepage="https://doi.org/10.5281/zenodo.1161203",
        folders=("miniboone",),
        forms=(("data.npy",), ("train.npy", "val.npy", "test.npy"), ("data.tar.gz",)),
        remotes=_MAF,
    ),
    Entry(
        name="Genesis",
        title="the Book of Genesis in the King James Version, by characters",
        task="text",
        sizes=(2460, 307, 307),
        input_shape=(64,),
        classes=60,
        licence="public domain",
        homepage="https://packages.debian.org/bookworm/bible-kjv-text",
    ),
)

ENTRIES: dict[str, Entry] = {entry.name: entry for entry in _ENTRIES}
NAMES: tuple[str, ...] = tuple(ENTRIES)


def plain(name: str) -> str:
    """A name without case and punctuation, for comparisons."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


_BY_PLAIN_NAME = {plain(n): entry for entry in _ENTRIES for n in (entry.name, *entry.aliases)}


def find_entry(name: str) -> Entry:
    """The entry of a dataset, by its name or an alias, in any case: ``"fashion-mnist"``, ``"SpoAD"``."""
    entry = _BY_PLAIN_NAME.get(plain(name))
    if entry is not None:
        return entry
    close = difflib.get_close_matches(plain(name), _BY_PLAIN_NAME, n=1)
    hint = f" Did you mean {_BY_PLAIN_NAME[close[0]].name}?" if close else ""
    raise ValueError(f"There is no dataset named {name!r}; choose from {', '.join(NAMES)}.{hint}")
