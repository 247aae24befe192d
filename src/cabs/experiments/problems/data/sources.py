"""Where the data sets come from, what their files are called, and their checksums.

The checksums of contents (of the uncompressed idx files, of the files inside the archives) say whether data that
was there already is the official data; the checksums of downloads guard the transfer.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Download:
    """A file on the web.

    Attributes:
        name: What the file is called, there and here.
        urls: Where it is, the next address being tried when one does not answer.
        size: Its length in bytes.
        sha256: Its checksum.
        members: For an archive, the paths inside it of the files to take out.
    """

    name: str
    urls: tuple[str, ...]
    size: int
    sha256: str
    members: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Source:
    """One data set.

    Attributes:
        name: The name used on the command line.
        title: The name used in sentences.
        homepage: Where the data set is described.
        folder: The directory that its archive unpacks to, if it has one.
        downloads: The files to fetch.
        train: The files with training examples: name and SHA-256 of the content.
        test: The same for test examples.
    """

    name: str
    title: str
    homepage: str
    folder: str = ""
    downloads: tuple[Download, ...]
    train: dict[str, str]
    test: dict[str, str]

    @property
    def files(self) -> dict[str, str]:
        """All files that are read, with the SHA-256 of their contents."""
        return {**self.train, **self.test}

    @property
    def size(self) -> int:
        """How many bytes fetching takes."""
        return sum(download.size for download in self.downloads)


def _mnist(name: str, size: int, sha256: str) -> Download:
    # The first is a copy that PyTorch's hosts keep; the author's own server often refuses downloads.
    hosts = (
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        "https://storage.googleapis.com/cvdf-datasets/mnist/",
    )
    return Download(name=name, urls=tuple(host + name for host in hosts), size=size, sha256=sha256)


def _svhn(name: str, size: int, sha256: str) -> Download:
    # The server speaks no https; the checksum is what makes the download trustworthy.
    return Download(name=name, urls=("http://ufldl.stanford.edu/housenumbers/" + name,), size=size, sha256=sha256)


MNIST = Source(
    name="mnist",
    title="MNIST",
    homepage="http://yann.lecun.com/exdb/mnist/",
    downloads=(
        _mnist(
            "train-images-idx3-ubyte.gz",
            9_912_422,
            "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
        ),
        _mnist(
            "train-labels-idx1-ubyte.gz",
            28_881,
            "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
        ),
        _mnist(
            "t10k-images-idx3-ubyte.gz",
            1_648_877,
            "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
        ),
        _mnist(
            "t10k-labels-idx1-ubyte.gz",
            4_542,
            "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
        ),
    ),
    train={
        "train-images-idx3-ubyte.gz": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
        "train-labels-idx1-ubyte.gz": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    },
    test={
        "t10k-images-idx3-ubyte.gz": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
        "t10k-labels-idx1-ubyte.gz": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
    },
)

SVHN = Source(
    name="svhn",
    title="SVHN",
    homepage="http://ufldl.stanford.edu/housenumbers/",
    downloads=(
        _svhn("train_32x32.mat", 182_040_794, "435e94d69a87fde4fd4d7f3dd208dfc32cb6ae8af2240d066de1df7508d083b8"),
        _svhn("test_32x32.mat", 64_275_384, "cdce80dfb2a2c4c6160906d0bd7c68ec5a99d7ca4831afa54f09182025b6a75b"),
    ),
    train={"train_32x32.mat": "435e94d69a87fde4fd4d7f3dd208dfc32cb6ae8af2240d066de1df7508d083b8"},
    test={"test_32x32.mat": "cdce80dfb2a2c4c6160906d0bd7c68ec5a99d7ca4831afa54f09182025b6a75b"},
)

_CIFAR10_FOLDER = "cifar-10-batches-bin"
_CIFAR10_TRAIN = {
    "data_batch_1.bin": "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
    "data_batch_2.bin": "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
    "data_batch_3.bin": "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
    "data_batch_4.bin": "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
    "data_batch_5.bin": "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
}
_CIFAR10_TEST = {"test_batch.bin": "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b"}

CIFAR10 = Source(
    name="cifar10",
    title="CIFAR-10",
    homepage="https://www.cs.toronto.edu/~kriz/cifar.html",
    folder=_CIFAR10_FOLDER,
    downloads=(
        Download(
            name="cifar-10-binary.tar.gz",
            urls=("https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",),
            size=170_052_171,
            sha256="c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
            members=tuple(f"{_CIFAR10_FOLDER}/{name}" for name in (*_CIFAR10_TRAIN, *_CIFAR10_TEST)),
        ),
    ),
    train=_CIFAR10_TRAIN,
    test=_CIFAR10_TEST,
)

_CIFAR100_FOLDER = "cifar-100-binary"

CIFAR100 = Source(
    name="cifar100",
    title="CIFAR-100",
    homepage="https://www.cs.toronto.edu/~kriz/cifar.html",
    folder=_CIFAR100_FOLDER,
    downloads=(
        Download(
            name="cifar-100-binary.tar.gz",
            urls=("https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz",),
            size=168_513_733,
            sha256="58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec",
            members=(f"{_CIFAR100_FOLDER}/train.bin", f"{_CIFAR100_FOLDER}/test.bin"),
        ),
    ),
    train={"train.bin": "f31298fc616915fa142368359df1c4ca2ae984d6915ca468b998a5ec6aeebf29"},
    test={"test.bin": "d8b1e6b7b3bee4020055f0699b111f60b1af1e262aeb93a0b659061746f8224a"},
)

_SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"

SHAKESPEARE = Source(
    name="shakespeare",
    title="Shakespeare",
    homepage="https://github.com/karpathy/char-rnn",
    downloads=(
        Download(
            name="input.txt",
            urls=("https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",),
            size=1_115_394,
            sha256=_SHAKESPEARE_SHA256,
        ),
    ),
    train={"input.txt": _SHAKESPEARE_SHA256},
    test={},
)

SOURCES = {source.name: source for source in (MNIST, SVHN, CIFAR10, CIFAR100, SHAKESPEARE)}
