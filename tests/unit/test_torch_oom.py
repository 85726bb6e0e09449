"""torch's sentence when memory ran out, in every shape that is about: figures in bytes, unknown where nobody knows."""

from __future__ import annotations

import attrs
import pytest

from startup_fsm.importers.torch_oom import Sentence, parse_sentence
from startup_fsm.memory import GIB, MIB
from startup_fsm.pages import OutOfMemoryFacts

ADVICE = (
    " If reserved but unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid "
    "fragmentation.  See documentation for Memory Management"
)
#: Recorded on an H200, torch 2.11.0+cu130.
H200 = (
    "CUDA out of memory. Tried to allocate 1024.00 GiB. GPU 0 has a total capacity of 139.80 GiB of which 139.09 GiB is "
    "free. Including non-PyTorch memory, this process has 722.00 MiB memory in use. Of the allocated memory 24.00 MiB is "
    "allocated by PyTorch, with 16.00 MiB allocated in private pools (e.g., CUDA Graphs), and 18.00 MiB is reserved by "
    "PyTorch but unallocated." + ADVICE
)


def gib(value):
    """Bytes of a figure in GiB."""
    return round(value * GIB)


def known(text):
    """What a sentence tells, by name."""
    said = parse_sentence(text)
    assert said is not None
    return {name: value for name, value in attrs.asdict(said).items() if value not in (None, ())}


class TestShapes:
    def test_first(self):
        """Of torch 1.x to 2.0: everything in brackets after the GPU."""
        text = (
            "CUDA out of memory. Tried to allocate 2.00 GiB (GPU 1; 15.78 GiB total capacity; 12.10 GiB already allocated; "
            "1.25 GiB free; 14.02 GiB reserved in total by PyTorch) If reserved memory is >> allocated memory try setting "
            "max_split_size_mb to avoid fragmentation."
        )
        assert known(text) == {
            "tried_bytes": 2 * GIB,
            "gpu": 1,
            "total_bytes": gib(15.78),
            "allocated_bytes": gib(12.1),
            "free_bytes": gib(1.25),
            "reserved_bytes": gib(14.02),
        }

    def test_misspelt(self):
        """Of torch 2.1: sentences, and a capacity that is spelt wrong."""
        text = (
            "CUDA out of memory. Tried to allocate 112.00 MiB. GPU 0 has a total capacty of 23.69 GiB of which 51.00 MiB is "
            "free. Including non-PyTorch memory, this process has 23.63 GiB memory in use. Of the allocated memory 22.90 "
            "GiB is allocated by PyTorch, and 312.45 MiB is reserved by PyTorch but unallocated. If reserved but "
            "unallocated memory is large try setting max_split_size_mb to avoid fragmentation."
        )
        assert known(text) == {
            "tried_bytes": 112 * MIB,
            "gpu": 0,
            "total_bytes": gib(23.69),
            "free_bytes": 51 * MIB,
            "process_bytes": gib(23.63),
            "allocated_bytes": gib(22.9),
            "reserved_unallocated_bytes": round(312.45 * MIB),
        }

    def test_private_pools(self):
        """Of torch 2.5 and later: what private pools hold."""
        assert known(H200) == {
            "tried_bytes": 1024 * GIB,
            "gpu": 0,
            "total_bytes": gib(139.8),
            "free_bytes": gib(139.09),
            "process_bytes": 722 * MIB,
            "allocated_bytes": 24 * MIB,
            "private_pool_bytes": 16 * MIB,
            "reserved_unallocated_bytes": 18 * MIB,
        }

    def test_hip(self):
        """ROCm writes the same body under another name."""
        assert known(H200.replace("CUDA out", "HIP out")) == known(H200)

    @pytest.mark.parametrize(
        ("text", "figures"),
        [
            (
                (
                    "RuntimeError: NPU out of memory. Tried to allocate 2.57 GiB (NPU 3; 60.96 GiB total capacity; 57.49 GiB already "
                    "allocated; 57.49 GiB current active; 1.96 GiB free; 57.62 GiB reserved in total by PyTorch) If reserved memory"
                ),
                (2.57, 3, 60.96, 57.49, 1.96, 57.62),
            ),
            (
                (
                    "NPU out of memory. NPUWorkspaceAllocator tried to allocate 1.25 GiB(NPU 0; 60.96 GiB total capacity; 50.00 GiB "
                    "already allocated; 50.00 GiB current active; 0.50 GiB free; 60.00 GiB reserved in total by PyTorch).If"
                ),
                (1.25, 0, 60.96, 50, 0.5, 60),
            ),
            (
                (
                    "MUSA out of memory. Tried to allocate 2.00 GiB (GPU 1; 47.99 GiB total capacity; 40.00 GiB already allocated; "
                    "1.50 GiB free; 41.00 GiB reserved in total by PyTorch)"
                ),
                (2, 1, 47.99, 40, 1.5, 41),
            ),
            (
                (
                    "XPU out of memory. Tried to allocate 5.12 GiB (GPU  0; 15.11 GiB total capacity; 13.40 GiB already allocated; "
                    "13.90 GiB reserved in total by PyTorch)"
                ),
                (5.12, 0, 15.11, 13.4, None, 13.9),
            ),
            (
                (
                    "CUDA out of memory. Tried to allocate 1.00 GiB (GPU 0; 11.17 GiB total capacity; 10.90 GiB already allocated; "
                    "0.25 GiB free; 0.50 GiB cached)"
                ),
                (1, 0, 11.17, 10.9, 0.25, 0.5),
            ),
        ],
        ids=["npu", "npu_workspace", "musa", "xpu", "oldest"],
    )
    def test_other_devices(self, text, figures):
        """Other makers keep the first shape, some without what is free."""
        names = ("tried_bytes", "gpu", "total_bytes", "allocated_bytes", "free_bytes", "reserved_bytes")
        wanted = {
            name: value if name == "gpu" else gib(value)
            for name, value in zip(names, figures, strict=True)
            if value is not None
        }
        assert known(text) == wanted

    def test_xpu_sentences(self):
        """XPU writes sentences too, without what is free."""
        text = (
            "XPU out of memory. Tried to allocate 12.50 GiB. GPU 0 has a total capacity of 15.56 GiB. Of the allocated memory "
            "15.05 GiB is allocated by PyTorch, and 8.04 MiB is reserved by PyTorch but unallocated."
        )
        assert known(text) == {
            "tried_bytes": gib(12.5),
            "gpu": 0,
            "total_bytes": gib(15.56),
            "allocated_bytes": gib(15.05),
            "reserved_unallocated_bytes": round(8.04 * MIB),
        }

    @pytest.mark.parametrize("setting", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
    def test_advice(self, setting):
        """Which setting the advice names makes no difference."""
        assert known(H200.replace("PYTORCH_CUDA_ALLOC_CONF", setting)) == known(H200)

    def test_async_backend(self):
        """The backend of cudaMallocAsync writes a small table."""
        text = (
            "Allocation on device 0 would exceed allowed memory. (out of memory)\n"
            "Currently allocated     : 9.43 GiB\n"
            "Requested               : 640.00 MiB\n"
            "Device limit            : 11.59 GiB\n"
            "Free (according to CUDA): 7.12 MiB\n"
            "PyTorch limit (set by user-supplied memory fraction)\n"
            "                        : 10.50 GiB"
        )
        assert known(text) == {
            "tried_bytes": 640 * MIB,
            "gpu": 0,
            "allocated_bytes": gib(9.43),
            "total_bytes": gib(11.59),
            "free_bytes": round(7.12 * MIB),
            "allowed_bytes": gib(10.5),
        }

    def test_our_own_model(self):
        """The sentence that the simulated device raises reads the same."""
        facts = OutOfMemoryFacts(
            tried_bytes=20 * MIB,
            device=3,
            total_bytes=80 * GIB,
            free_bytes=2 * MIB,
            process_bytes=70 * GIB,
            torch_allocated_bytes=60 * GIB,
            private_pool_bytes=3 * GIB,
            torch_reserved_bytes=65 * GIB,
            other_processes=(("99", 9 * GIB),),
            allowed_bytes=64 * GIB,
        )
        assert parse_sentence(facts.sentence()) == Sentence(
            tried_bytes=20 * MIB,
            gpu=3,
            total_bytes=80 * GIB,
            free_bytes=2 * MIB,
            process_bytes=70 * GIB,
            allocated_bytes=60 * GIB,
            private_pool_bytes=3 * GIB,
            reserved_unallocated_bytes=5 * GIB,
            allowed_bytes=64 * GIB,
            tenants=((99, 9 * GIB),),
        )


class TestParts:
    def test_tenants(self):
        """Other processes are named, each with its bytes; this one is not among them."""
        text = H200.replace(
            "Including", "Process 4121 has 22.05 GiB memory in use. Process 77 has 512.00 MiB memory in use. Including"
        )
        said = parse_sentence(text)
        assert said.tenants == ((4121, gib(22.05)), (77, 512 * MIB))
        assert said.process_bytes == 722 * MIB

    def test_nobody_knows(self):
        """A figure of 2^64 - 1 bytes is a driver that does not tell."""
        text = H200.replace("has 722.00 MiB", "has 17179869184.00 GiB").replace(
            "Including", "Process 1 has 17179869184.00 GiB memory in use. Including"
        )
        said = parse_sentence(text)
        assert said.process_bytes is None
        assert said.tenants == ((1, None),)
        assert said.free_bytes == gib(139.09)

    def test_no_number(self):
        """The number of the GPU may be empty."""
        said = parse_sentence(H200.replace("GPU 0 has", "GPU  has"))
        assert (said.gpu, said.total_bytes) == (None, gib(139.8))

    def test_limit(self):
        """A limit that the process set itself."""
        said = parse_sentence(H200.replace("in use. Of", "in use. 6.99 GiB allowed; Of"))
        assert (said.allowed_bytes, said.process_bytes, said.allocated_bytes) == (gib(6.99), 722 * MIB, 24 * MIB)

    def test_small(self):
        """Bytes and KiB are units too."""
        said = parse_sentence(H200.replace("1024.00 GiB", "512 bytes").replace("24.00 MiB", "3.50 KiB"))
        assert (said.tried_bytes, said.allocated_bytes) == (512, 3_584)

    def test_inside_a_log(self):
        """What stands before and after it in a log makes no difference."""
        assert known(f"ERROR 11-30 [core.py:412] torch.OutOfMemoryError: {H200}\nTraceback ...") == known(H200)

    def test_first_of_two(self):
        """Of two sentences that follow each other the first one counts for what was tried."""
        assert parse_sentence(f"{H200}\n{H200.replace('1024.00 GiB', '8.00 GiB')}").tried_bytes == 1024 * GIB

    def test_cut_before_another(self):
        """A sentence that was cut takes nothing from the one behind it."""
        cut = H200[: H200.index(" Of the allocated")]
        assert known(f"{cut}\n{H200.replace('1024.00 GiB', '8.00 GiB')}") == known(cut)
        assert parse_sentence(cut).process_bytes == 722 * MIB

    @pytest.mark.parametrize(
        ("end", "names"),
        [
            (" GiB. GPU 0", set()),
            (". GPU 0", {"tried_bytes"}),
            (" is free. Including", {"tried_bytes", "gpu", "total_bytes"}),
            (" memory in use.", {"tried_bytes", "gpu", "total_bytes", "free_bytes"}),
        ],
    )
    def test_cut(self, end, names):
        """What stands before a cut is read, and no half of a number."""
        said = parse_sentence(H200[: H200.index(end)])
        assert {name for name, value in attrs.asdict(said).items() if value not in (None, ())} == names

    def test_wrapped(self):
        """A terminal that is too narrow breaks the sentence anywhere between two words."""
        for width in range(3, 40):
            words, wrapped = H200.split(" "), ""
            for at, word in enumerate(words):
                wrapped += word + ("\n" if at % width == 0 else " ")
            assert known(wrapped) == known(H200)


class TestNone:
    @pytest.mark.parametrize(
        "text",
        [
            "",
            "CUDA error: out of memory",
            "Tried to allocate more than 1EB memory.",
            "RuntimeError: shapes cannot be multiplied",
            "Killed",
        ],
    )
    def test_no_figures(self, text):
        """A text without a sentence gives nothing."""
        assert parse_sentence(text) is None

    def test_long_text(self):
        """A long log without a sentence is read in one pass."""
        assert parse_sentence("Tried to allocate x (GPU 9 free; " * 100_000) is None
