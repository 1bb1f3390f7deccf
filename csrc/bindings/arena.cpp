// Outputs: blocks of a window's heap, as tensors of any array library.
#include <pybind11/stl.h>

#include <cstdlib>
#include <cstring>
#include <new>
#include <optional>

#include "../runtime/arena.h"
#include "../runtime/dlpack.h"
#include "module.h"
#include "torch.h"

namespace py = pybind11;
using namespace moecomm::runtime;

namespace moecomm::bindings {
namespace {

// Zeroed memory of this process for data outside tensors: failure records, abort words, routes.
class HostMemory {
  public:
    static constexpr u64 kAlignment = 256;

    explicit HostMemory(u64 bytes) : bytes_(bytes) {
        const u64 room = align_up<u64>(bytes > 0 ? bytes : 1, kAlignment);
        at_ = bytes <= room ? std::aligned_alloc(kAlignment, room) : nullptr;
        if (at_ == nullptr) throw std::bad_alloc();
        std::memset(at_, 0, room);
    }
    HostMemory(const HostMemory&) = delete;
    HostMemory& operator=(const HostMemory&) = delete;
    ~HostMemory() { std::free(at_); }

    u64 address() const { return reinterpret_cast<u64>(at_); }
    u64 bytes() const { return bytes_; }

  private:
    void* at_;
    u64 bytes_;
};

constexpr const char* kCapsule = "dltensor";  // a consumer renames the capsule and calls the deleter itself

bool finalizing() {
#if PY_VERSION_HEX >= 0x030d0000
    return Py_IsFinalizing() != 0;
#else
    return _Py_IsFinalizing() != 0;
#endif
}

// A tensor may die in any thread, with or without the GIL, and after Python itself.
void drop(PyObject* owner) {
    if (finalizing() || Py_IsInitialized() == 0) return;
    const PyGILState_STATE state = PyGILState_Ensure();
    Py_DECREF(owner);
    PyGILState_Release(state);
}

void delete_unconsumed(PyObject* capsule) {
    if (PyCapsule_IsValid(capsule, kCapsule) == 0) return;
    py::error_scope keep;  // an exception may be on its way
    auto* managed = static_cast<DLManagedTensor*>(PyCapsule_GetPointer(capsule, kCapsule));
    managed->deleter(managed);
}

// `owner` lives until the deleter of what is made has been called.
template <class Managed>
Managed* managed_tensor(std::shared_ptr<Block> block, u64 address, std::vector<i64> shape, DLDataType type, DLDevice device,
                        py::object owner) {
    std::function<void()> released;
    if (!owner.is_none()) released = [kept = owner.ptr()] { drop(kept); };
    auto* managed = make_tensor<Managed>(std::move(block), address, std::move(shape), type, device, std::move(released));
    owner.release();  // the deleter has it now
    return managed;
}

py::object capsule(std::shared_ptr<Block> block, u64 address, std::vector<i64> shape, u8 code, u8 bits, i32 device_type, i32 device_id,
                   py::object owner) {
    auto* managed = managed_tensor<DLManagedTensor>(std::move(block), address, std::move(shape), {code, bits, 1}, {device_type, device_id},
                                                    std::move(owner));
    auto made = py::reinterpret_steal<py::object>(PyCapsule_New(managed, kCapsule, delete_unconsumed));
    if (!made) {
        managed->deleter(managed);
        throw py::error_already_set();
    }
    return made;
}

// None in Python if there is none.
std::optional<std::shared_ptr<Block>> found(std::shared_ptr<Block> block) {
    if (block == nullptr) return std::nullopt;
    return block;
}

}  // namespace

Tensor torch_tensor(std::shared_ptr<Block> block, u64 address, std::vector<i64> shape, DLDataType type, DLDevice device, py::object owner) {
    const Torch& torch = Torch::instance();
    auto* managed = managed_tensor<DLManagedTensorVersioned>(std::move(block), address, std::move(shape), type, device, std::move(owner));
    void* made = nullptr;
    if (torch.exchange->managed_to_object(managed, &made) != 0) throw py::error_already_set();
    return Tensor(py::reinterpret_steal<py::object>(static_cast<PyObject*>(made)));
}

void bind_arena(py::module_& m) {
    py::class_<Block, std::shared_ptr<Block>>(
        m, "Block", "A range of an Arena.  It goes back when the object and everything made by tensor() are gone.")
        .def_property_readonly("offset", &Block::offset)
        .def_property_readonly("nbytes", &Block::bytes)
        .def_property_readonly("end", &Block::end, "`offset + nbytes`.")
        .def("shrink", &Block::shrink, py::arg("nbytes"), R"(Give the tail back.  No tensor may reach past `nbytes`.

Raises:
    ValueError: the block is smaller than that.)")
        .def("tensor", &capsule, py::arg("address"), py::arg("shape"), py::arg("code"), py::arg("bits"), py::arg("device_type"),
             py::arg("device_id"), py::arg("owner") = py::none(),
             R"(A DLPack capsule ("dltensor") of a C-contiguous tensor at `address`; keeps the block and `owner`.

`code`, `bits`, `device_type` are DLPack's.

Raises:
    ValueError: a bad shape, or more bytes than the block has.)")
        .def(
            "torch_tensor",
            [](std::shared_ptr<Block> block, u64 address, std::vector<i64> shape, u8 code, u8 bits, i32 device_type, i32 device_id,
               py::object owner) {
                return torch_tensor(std::move(block), address, std::move(shape), {code, bits, 1}, {device_type, device_id},
                                    std::move(owner));
            },
            py::arg("address"), py::arg("shape"), py::arg("code"), py::arg("bits"), py::arg("device_type"), py::arg("device_id"),
            py::arg("owner"), "As tensor(), a torch tensor.");
    py::class_<Arena, std::shared_ptr<Arena>>(m, "Arena",
                                              "Allocator of ranges of [offset, offset + nbytes): 256-byte aligned, from any thread.")
        .def(py::init<u64, u64>(), py::arg("offset"), py::arg("nbytes"))
        .def(
            "allocate", [](Arena& arena, u64 nbytes, u64 from) { return found(arena.allocate(nbytes, from)); }, py::arg("nbytes"),
            py::arg("at_least") = 0, "First fit at the offset `at_least` or above, else first fit.  None if no free range is long enough.")
        .def_property_readonly("begin", &Arena::begin, "The first offset, a multiple of 256.")
        .def_property_readonly("end", &Arena::end, "The offset behind the last byte.")
        .def_property_readonly("used", &Arena::used, "Bytes allocated, in multiples of 256.")
        .def_property_readonly("largest_free", &Arena::largest_free);
    py::class_<HeapParts, std::shared_ptr<HeapParts>>(m, "HeapParts", R"(Where blocks of a heap go: see moecomm.rounds.memory.

`first_row`: rows begin there, where they can.  `end`: of blocks that stay; the `reserve` follows, at the end of
`reserved`, which is `arena` or memory behind it.  Blocks in extensions stay, too.
`agreed`: a round of which no rank needs more bytes than this finds room on all ranks.)")
        .def(py::init<std::shared_ptr<Arena>>(), py::arg("arena"))
        .def_readonly("first_row", &HeapParts::first_row)
        .def_readonly("end", &HeapParts::end)
        .def_readonly("reserve", &HeapParts::reserve)
        .def_readonly("reserved", &HeapParts::reserved)
        .def_readwrite("agreed", &HeapParts::agreed)
        .def_readonly("replayed", &HeapParts::replayed, "Blocks of earlier reserves, which graphs write to: a copy.")
        .def("divide", &HeapParts::divide, py::arg("first_row"), py::arg("reserve"),
             R"(Give the end of the arena to the reserve, and let rows begin at `first_row`.

Raises:
    RuntimeError: the reserve has moved.)")
        .def(
            "move_reserve",
            [](HeapParts& parts, std::shared_ptr<Arena> to, const std::vector<std::pair<std::shared_ptr<Arena>, u64>>& others,
               std::vector<std::shared_ptr<Block>> replayed) {
                std::vector<Extension> extensions;
                for (const auto& [arena, first_row] : others) extensions.push_back({arena, first_row});
                parts.move_reserve(std::move(to), std::move(extensions), std::move(replayed));
            },
            py::arg("to"), py::arg("others"), py::arg("replayed"),
            R"(Let the reserve be all of an arena behind the first one.

`others`: arenas for blocks that stay, and where rows begin there.  `replayed`: blocks that are never freed.)")
        .def(
            "extend",
            [](HeapParts& parts, std::shared_ptr<Arena> arena, u64 first_row) {
                parts.extensions.push_back({std::move(arena), first_row});
            },
            py::arg("arena"), py::arg("first_row"), "Add memory behind the arena.")
        .def_property_readonly(
            "extensions",
            [](const HeapParts& parts) {
                std::vector<std::shared_ptr<Arena>> arenas;
                for (const Extension& extension : parts.extensions) arenas.push_back(extension.arena);
                return arenas;
            },
            "The arenas of extend(): a copy.")
        .def("stays", &HeapParts::stays, py::arg("block"), "Return whether a block may be in use when its call has returned.")
        .def(
            "allocate_tables", [](const HeapParts& parts, u64 nbytes) { return found(parts.allocate_tables(nbytes)); }, py::arg("nbytes"),
            "A block that stays; None if there is no such room.")
        .def(
            "allocate_rows", [](const HeapParts& parts, u64 nbytes) { return found(parts.allocate_rows(nbytes)); }, py::arg("nbytes"),
            "As allocate_tables(), for rows.");
    py::class_<HostMemory>(m, "HostMemory", "Zeroed memory at a multiple of 256, freed with the object.")
        .def_property_readonly("address", &HostMemory::address)
        .def_property_readonly("nbytes", &HostMemory::bytes);
    m.def("host_alloc", [](u64 bytes) { return std::make_unique<HostMemory>(bytes); }, py::arg("nbytes"), "Allocate zeroed memory.");
}

}  // namespace moecomm::bindings
