// A dispatch or a combine of a kind that there was before: one call of Python finds its plan, checks the tensors and runs it.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <pybind11/typing.h>

#include <optional>
#include <utility>

#include "../protocol/order.h"
#include "../protocol/record.h"
#include "../protocol/slots.h"
#include "../runtime/arena.h"
#include "arguments.h"
#include "call_ring.h"
#include "module.h"
#include "prepared.h"
#include "turn.h"

namespace py = pybind11;
using namespace moecomm::runtime;

namespace moecomm::bindings {
namespace {

// Names of attributes that calls read or write, and classes and functions of Python that they use.
struct Known {
    static py::object name(const char* text) { return py::reinterpret_steal<py::object>(PyUnicode_InternFromString(text)); }

    const py::object args = name("args"), back = name("back"), block = name("block"), check = name("check"), copies = name("copies"),
                     data_ptr = name("data_ptr"), dropped = name("dropped"), dtype = name("dtype"), extend = name("extend"),
                     handle = name("handle"), inputs = name("inputs"), layout = name("layout"), native = name("native"),
                     new_empty = name("new_empty"), options = name("options"), payload = name("payload"), plan = name("plan"),
                     requires_grad = name("requires_grad"), rounds = name("rounds"), sync = name("sync"), tensor = name("tensor"),
                     tensors = name("_tensors"), unfinished = name("unfinished"), unpack = name("unpack"), weighted = name("weighted"),
                     weights_read = name("weights_read");
    const py::module_ routed = py::module_::import("moecomm.dispatch.routed");
    const py::object handle_type = routed.attr("Handle"), routed_type = routed.attr("Routed");
    const py::object is_grad_enabled = py::module_::import("torch").attr("is_grad_enabled");
    const py::object increment_version = py::module_::import("torch").attr("autograd").attr("graph").attr("increment_version");
};

py::object get(py::handle object, const py::object& name) {
    auto found = py::reinterpret_steal<py::object>(PyObject_GetAttr(object.ptr(), name.ptr()));
    if (!found) throw py::error_already_set();
    return found;
}

void set(const py::object& object, const py::object& name, py::handle value) {
    if (PyObject_SetAttr(object.ptr(), name.ptr(), value.ptr()) != 0) throw py::error_already_set();
}

// A new object of a class of Python, without a call of its constructor.
py::object made(const py::object& type) {
    auto* const kind = reinterpret_cast<PyTypeObject*>(type.ptr());
    auto object = py::reinterpret_steal<py::object>(kind->tp_alloc(kind, 0));
    if (!object) throw py::error_already_set();
    return object;
}

bool is_a(py::handle object, const py::object& type) {
    return PyObject_TypeCheck(object.ptr(), reinterpret_cast<PyTypeObject*>(type.ptr())) != 0;
}

using Plans = py::typing::Dict<py::object, py::object>;
using Result = py::typing::Tuple<py::handle, bool>;

class KnownCalls {
  public:
    KnownCalls(Plans plans, std::shared_ptr<HeapParts> heap, py::object ring, std::shared_ptr<Turn> turn, u64 record, bool on_host)
        : plans_(std::move(plans)),
          heap_(std::move(heap)),
          ring_(std::move(ring)),
          turn_(std::move(turn)),
          record_(record),
          on_host_(on_host) {}

    // The Routed, and true if the call is over; None if this is not a plain call of a kind that there was before.
    Result dispatch(py::object rounds, py::handle request, py::handle x, py::handle topk_idx, py::handle topk_weights, py::handle scales,
                    py::handle max_rows, py::object handle, py::handle sync, py::handle packing) {
        if (failed() || !(sync.is_none() || PyBool_Check(sync.ptr()))) return nothing_;
        const bool waits = sync.is_none() ? on_host_ : sync.ptr() == Py_True, repeats = !handle.is_none();
        if (repeats && !(is_from(handle, rounds) && topk_idx.is_none() && topk_weights.is_none() && max_rows.is_none())) return nothing_;
        const py::object layout = repeats ? get(get(handle, known_.plan), known_.layout) : get(get(request, known_.options), known_.layout);
        // dispatch.options.Key: layout, repeat, chunk, payload, compares, request.
        const py::object plans = plans_of(py::make_tuple(layout, repeats, false, packing, false, request));
        if (!plans) return nothing_;
        const DispatchTensors given(x, scales, topk_idx, topk_weights);
        if (!given.readable() || any_requires_grad(x, topk_weights)) return nothing_;
        const DispatchInputs inputs = given.get();
        for (const py::handle plan_object : py::reinterpret_borrow<py::list>(plans)) {
            const py::object plan = py::reinterpret_borrow<py::object>(plan_object), native = get(plan, known_.native);
            const auto& prepared = native.cast<const PreparedDispatch&>();
            if (!prepared.takes(inputs)) continue;
            const i32 tokens = static_cast<i32>(inputs.x->shape[0]);
            const std::shared_ptr<Runner> runner = ready(prepared.runs, tokens, prepared.workers(tokens));
            if (runner == nullptr) return nothing_;
            std::shared_ptr<Block> payload, kept;
            const std::optional<DispatchArgs> args =
                repeats ? bind_repeat(prepared, handle, inputs, payload) : bind_anew(prepared, max_rows, waits, inputs, payload, kept);
            if (!args) return nothing_;
            const py::object bound = py::cast(*args), rows_here = py::cast(payload);
            if (!repeats) handle = new_handle(rounds, plan, bound, py::cast(kept));
            const py::object routed = new_routed(handle, plan, bound, rows_here, waits, packing);
            auto& running = bound.cast<DispatchArgs&>();
            try {
                run(*runner, prepared.kind, running);
            } catch (py::error_already_set&) {  // peers may still write there
                get(get(rounds, known_.unfinished), known_.extend)(py::make_tuple(rows_here, get(handle, known_.block)));
                throw;
            }
            // Where rows have no room, other rounds follow.  The caller sees that, unless a signal handler comes first.
            turn_->several = waits && max_rows.is_none() && (!on_host_ || failed());
            if (!on_host_) return py::make_tuple(routed, !waits);
            if (failed()) return py::make_tuple(routed, false);
            if (waits && !repeats && running.layout != static_cast<i32>(Layout::batched)) trim(running, *payload);
            return py::make_tuple(routed, true);
        }
        return nothing_;
    }

    // The result of the combine, and true if it is over; None as in dispatch().
    Result combine(const py::object& rounds, py::handle request, py::handle y, const py::object& handle, py::object out, py::handle bias,
                   py::handle weight_grads, py::handle topk_weights) {
        if (failed() || !is_from(handle, rounds)) return nothing_;
        const py::object earlier = get(handle, known_.args);
        const auto& dispatch = earlier.cast<const DispatchArgs&>();
        if (dispatch.part == static_cast<i32>(Part::begin)) return nothing_;
        const bool gives_out = !out.is_none();
        CombineArguments given(y, out, bias, weight_grads, py::none(), topk_weights);
        if (y.is_none() || !given.readable() || any_requires_grad(y, out, bias, weight_grads, topk_weights)) return nothing_;
        const py::object layout = get(get(handle, known_.plan), known_.layout);
        // combine.options.Key: layout, dtype, request.
        const py::object plans = plans_of(py::make_tuple(layout, get(y, known_.dtype), request));
        if (!plans) return nothing_;
        if (topk_weights.is_none() && get(get(request, known_.options), known_.weighted).ptr() != Py_False && !weights_are_there(handle))
            return nothing_;
        CombineTensors tensors = given.get();
        for (const py::handle plan : py::reinterpret_borrow<py::list>(plans)) {
            const py::object native = get(plan, known_.native);
            const auto& prepared = native.cast<const PreparedCombine&>();
            if (!prepared.takes(dispatch, tensors)) continue;
            const i32 tokens = dispatch.num_tokens;
            const std::shared_ptr<Runner> runner = ready(prepared.runs, tokens, prepared.workers(tokens));
            if (runner == nullptr) return nothing_;
            const bool in_window = py::isinstance<Block>(get(handle, known_.block));
            if (!in_window && prepared.peers_read_weights && !prepared.in_window(dispatch.route.row_weights)) return nothing_;
            py::object grads = py::none();
            if (!gives_out) out = new_empty(prepared.like_out, tokens, prepared.args().hidden);
            if (!weight_grads.is_none()) grads = new_empty(prepared.like_grads, tokens, dispatch.ctx.shape.topk);
            const Argument to(out), grads_to(grads);
            tensors.out = to.get();
            tensors.out_weight_grads = grads_to.get();
            std::shared_ptr<Block> reduced;
            if (const u64 bytes = prepared.reduced_bytes(dispatch)) reduced = scratch(bytes);
            const u64 place = reduced == nullptr ? 0 : window_of(dispatch.ctx, dispatch.ctx.rank) + reduced->offset();
            const std::optional<CombineArgs> args = prepared.bind(dispatch, tensors, place);
            if (!to.readable() || !grads_to.readable() || !args) return nothing_;
            if (gives_out) known_.increment_version(out);
            run(*runner, prepared.kind, *args);
            const bool over = !on_host_ || !failed();
            return py::make_tuple(grads.is_none() ? out : py::object(py::make_tuple(out, grads)), over);
        }
        return nothing_;
    }

  private:
    // True if a round has left a failure behind that has not been raised yet.
    bool failed() const { return load_acquire(&reinterpret_cast<const FailureRecord*>(record_)->code) != 0; }

    bool is_from(py::handle handle, const py::object& rounds) const {
        return is_a(handle, known_.handle_type) && get(handle, known_.rounds).is(rounds);
    }

    // True if a gradient of any of these tensors is wanted, or may be.
    template <class... Tensors>
    bool any_requires_grad(Tensors... tensors) const {
        const auto requires_grad = [&](py::handle tensor) {
            return !tensor.is_none() && get(tensor, known_.requires_grad).ptr() != Py_False;
        };
        return (requires_grad(tensors) || ...) && known_.is_grad_enabled().ptr() != Py_False;
    }

    py::object new_empty(const py::object& like, i64 rows, i64 columns) const {
        const py::int_ first(rows), second(columns);
        PyObject* const arguments[] = {like.ptr(), first.ptr(), second.ptr()};
        auto tensor = py::reinterpret_steal<py::object>(PyObject_VectorcallMethod(known_.new_empty.ptr(), arguments, 3, nullptr));
        if (!tensor) throw py::error_already_set();
        return tensor;
    }

    // True if the `row_weights` that a caller has read are still where combine reads them: Handle.check_row_weights.
    bool weights_are_there(py::handle handle) const {
        const py::object read = get(handle, known_.weights_read);
        if (read.is_none()) return true;
        const py::tuple parts = read;  // a weak reference to them, and their address then
        const py::object weights = parts[0]();
        return weights.is_none() || get(weights, known_.data_ptr)().equal(parts[1]);
    }

    // The plans of a kind of calls; null if there are none.
    py::object plans_of(const py::tuple& key) const {
        PyObject* const found = PyDict_GetItemWithError(plans_.ptr(), key.ptr());
        if (found == nullptr) PyErr_Clear();  // an option that can't be hashed, which the checks will name
        return py::reinterpret_borrow<py::object>(found);
    }

    static std::shared_ptr<Runner> ready(const Runs& runs, i32 tokens, i32 workers) {
        const auto found = runs.find(tokens);
        if (found == runs.end() || found->second.runner == nullptr || !found->second.runner->ready(workers)) return nullptr;
        return found->second.runner;
    }

    // A block that stays for rows; null if there is no such room.
    std::shared_ptr<Block> rows(u64 bytes) const { return bytes > heap_->reserve ? nullptr : heap_->allocate_rows(bytes); }

    // A block that is freed before the call returns.
    std::shared_ptr<Block> scratch(u64 bytes) const {
        auto block = heap_->reserved->allocate(bytes, heap_->end);
        return block != nullptr ? block : heap_->allocate_rows(bytes);
    }

    // The arguments of a dispatch along a handle, and a block for its rows; nullopt if the plan or the room does not fit.
    std::optional<DispatchArgs> bind_repeat(const PreparedDispatch& plan, py::handle handle, const DispatchInputs& inputs,
                                            std::shared_ptr<Block>& payload) const {
        const py::object earlier = get(handle, known_.args), tables = get(handle, known_.block);
        const auto& before = earlier.cast<const DispatchArgs&>();
        if (py::isinstance<Block>(tables) && !heap_->stays(tables.cast<const Block&>())) return std::nullopt;
        const py::object native = get(get(handle, known_.plan), known_.native);
        const auto& first = native.cast<const PreparedDispatch&>();
        const bool agrees = plan.always_agrees || before.route.max_rows == first.rows;
        if (agrees && plan.largest_payload_bytes(first.rows_of_all) > heap_->agreed) return std::nullopt;
        if (!(payload = rows(plan.payload_bytes(before.max_rows)))) return std::nullopt;
        return plan.repeat(*payload, before, inputs);
    }

    // As bind_repeat(), of a dispatch with a routing of its own, whose tables take a block as well.
    std::optional<DispatchArgs> bind_anew(const PreparedDispatch& plan, py::handle max_rows, bool waits, const DispatchInputs& inputs,
                                          std::shared_ptr<Block>& payload, std::shared_ptr<Block>& kept) const {
        const std::optional<i32> room = room_for(plan, max_rows);
        const bool agrees = plan.always_agrees || max_rows.is_none();
        if (!room || (agrees && plan.largest_bytes > heap_->agreed)) return std::nullopt;
        const u64 table_bytes = plan.kept_bytes(*room), row_bytes = plan.payload_bytes(*room);
        if (table_bytes + row_bytes > heap_->reserve) return std::nullopt;
        if (!(kept = heap_->allocate_tables(table_bytes)) || !(payload = rows(row_bytes))) return std::nullopt;
        std::optional<DispatchArgs> args = plan.bind(*payload, *kept, *room, inputs);
        if (args && !max_rows.is_none() && !waits && args->layout == static_cast<i32>(Layout::flat)) args->clear_rows = *room;
        return args;
    }

    // Rows to make room for; nullopt if `max_rows` is no number of rows.
    static std::optional<i32> room_for(const PreparedDispatch& plan, py::handle max_rows) {
        if (max_rows.is_none()) return plan.rows;
        if (!PyLong_CheckExact(max_rows.ptr())) return std::nullopt;
        int overflow = 0;
        const i64 wanted = PyLong_AsLongLongAndOverflow(max_rows.ptr(), &overflow);
        if (overflow != 0 || wanted < 0) return std::nullopt;
        return wanted >= plan.most_rows ? plan.most_rows : static_cast<i32>(std::min<i64>(wanted * plan.groups, plan.most_rows));
    }

    py::object new_handle(py::handle rounds, py::handle plan, py::handle args, py::handle block) const {
        py::object handle = made(known_.handle_type);
        set(handle, known_.rounds, rounds);
        set(handle, known_.plan, plan);
        set(handle, known_.args, args);
        set(handle, known_.block, block);
        set(handle, known_.weights_read, Py_None);
        return handle;
    }

    py::object new_routed(py::handle handle, py::handle plan, py::handle args, py::handle payload, bool sync, py::handle packing) const {
        py::object routed = made(known_.routed_type);
        set(routed, known_.handle, handle);
        set(routed, known_.plan, plan);
        set(routed, known_.args, args);
        set(routed, known_.payload, payload);
        set(routed, known_.sync, sync ? Py_True : Py_False);
        set(routed, known_.unpack, packing.is_none() ? py::none() : get(packing, known_.tensor));
        for (const py::object* none : {&known_.dropped, &known_.back, &known_.inputs, &known_.check, &known_.copies})
            set(routed, *none, Py_None);
        set(routed, known_.tensors, py::dict());
        return routed;
    }

    template <class Args>
    void run(Runner& runner, const py::object& kind, const Args& args) {
        auto& ring = ring_.cast<CallRing&>();
        const i64 record = ring.begin(kind, args.num_tokens, false);
        runner.run(args);
        ring.end(record);
        ++turn_->made;
    }

    // Free the memory of rows that did not arrive.
    static void trim(DispatchArgs& args, Block& payload) {
        args.max_rows = *reinterpret_cast<const i32*>(args.num_rows);
        if (payload.bytes() == 0) return;
        const u64 used = args.out_x - payload.offset() + static_cast<u64>(args.max_rows) * static_cast<u64>(args.row_bytes);
        payload.shrink(std::max<u64>(1, used));
    }

    const Result nothing_ = py::make_tuple(py::none(), false);
    const Known known_;
    // Nothing here refers to the Rounds, which owns this object: Python's collector does not see such cycles.
    Plans plans_;
    std::shared_ptr<HeapParts> heap_;
    py::object ring_;
    std::shared_ptr<Turn> turn_;
    u64 record_;
    bool on_host_;
};

}  // namespace

void bind_known_calls(py::module_& m) {
    py::class_<KnownCalls>(m, "KnownCalls", R"(Dispatches and combines of kinds that there were before.

Plain calls: no graph is captured, no round is verified or traced, and outputs stay in the window.
The arguments are those of moecomm.dispatch.dispatch and moecomm.combine.combine.

`plans`: lists of plans by what a call asks for: moecomm.rounds.plans.
`ring`: the flight recorder's.
`turn`: of the calls; its `made` counts the rounds.
`record`: address of the failure record.
`on_host`: of a CPU rank.)")
        .def(py::init<Plans, std::shared_ptr<HeapParts>, py::object, std::shared_ptr<Turn>, u64, bool>(), py::arg("plans"), py::arg("heap"),
             py::arg("ring"), py::arg("turn"), py::arg("record"), py::arg("on_host"))
        .def("dispatch", &KnownCalls::dispatch, py::arg("rounds"), py::arg("request"), py::arg("x"), py::arg("topk_idx"),
             py::arg("topk_weights"), py::arg("scales"), py::arg("max_rows"), py::arg("handle"), py::arg("sync"),
             py::arg("payload") = py::none(),
             R"(Run a dispatch.  Returns a Routed, and whether the call is over.

The Routed is None, and nothing has been done, if this is no plain call, there is no plan for it, or an
argument can't be used.)")
        .def("combine", &KnownCalls::combine, py::arg("rounds"), py::arg("request"), py::arg("y"), py::arg("handle"), py::arg("out"),
             py::arg("bias"), py::arg("weight_grads"), py::arg("topk_weights"),
             "Run a combine.  Returns its result, and whether it is over; None as dispatch().");
}

}  // namespace moecomm::bindings
