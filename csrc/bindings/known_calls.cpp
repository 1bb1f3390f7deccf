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

namespace py = pybind11;
using namespace moecomm::runtime;

namespace moecomm::bindings {
namespace {

// Names of attributes, and the classes of moecomm.routed.  Looked up once and never dropped.
struct Known {
    static PyObject* name(const char* text) { return PyUnicode_InternFromString(text); }

    PyObject *const args = name("args"), *const back = name("back"), *const block = name("block"), *const check = name("check"),
                    *const data_ptr = name("data_ptr"), *const dropped = name("dropped"), *const dtype = name("dtype"),
                    *const extend = name("extend"), *const handle = name("handle"), *const inputs = name("inputs"),
                    *const layout = name("layout"), *const native = name("native"), *const new_empty = name("new_empty"),
                    *const payload = name("payload"), *const plan = name("plan"), *const requires_grad = name("requires_grad"),
                    *const rounds = name("rounds"), *const sync = name("sync"), *const tensors = name("_tensors"),
                    *const unfinished = name("unfinished"), *const weighted = name("weighted"), *const weights_read = name("weights_read");
    py::object handle_type, routed_type, increment_version;

    Known() {
        const py::module_ routed = py::module_::import("moecomm.routed");
        handle_type = routed.attr("Handle");
        routed_type = routed.attr("Routed");
        increment_version = py::module_::import("torch").attr("autograd").attr("graph").attr("increment_version");
    }
    static const Known& instance() {
        static const Known* const found = new Known;
        return *found;
    }
};

py::object get(py::handle object, PyObject* name) {
    auto found = py::reinterpret_steal<py::object>(PyObject_GetAttr(object.ptr(), name));
    if (!found) throw py::error_already_set();
    return found;
}

void set(const py::object& object, PyObject* name, py::handle value) {
    if (PyObject_SetAttr(object.ptr(), name, value.ptr()) != 0) throw py::error_already_set();
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

// Whether a gradient of any of these tensors is wanted, or may be.
template <class... Tensors>
bool any_requires_grad(const Known& known, Tensors... tensors) {
    const auto requires_grad = [&](py::handle tensor) { return !tensor.is_none() && get(tensor, known.requires_grad).ptr() != Py_False; };
    return (requires_grad(tensors) || ...);
}

py::object new_empty(const Known& known, const py::object& like, i64 rows, i64 columns) {
    const py::int_ first(rows), second(columns);
    PyObject* const arguments[] = {like.ptr(), first.ptr(), second.ptr()};
    auto tensor = py::reinterpret_steal<py::object>(PyObject_VectorcallMethod(known.new_empty, arguments, 3, nullptr));
    if (!tensor) throw py::error_already_set();
    return tensor;
}

// Whether `row_weights`, which a caller has read, are where combine reads them: Handle.check_row_weights.
bool weights_are_there(const Known& known, py::handle handle) {
    const py::object read = get(handle, known.weights_read);
    if (read.is_none()) return true;
    const py::tuple parts = read;  // a weak reference to them, and their address then
    const py::object weights = parts[0]();
    return weights.is_none() || get(weights, known.data_ptr)().equal(parts[1]);
}

using Plans = py::typing::Dict<py::object, py::object>;
using Result = py::typing::Tuple<py::handle, bool>;

class KnownCalls {
  public:
    KnownCalls(Plans plans, std::shared_ptr<HeapParts> heap, py::object ring, u64 record, bool on_host)
        : plans_(std::move(plans)), heap_(std::move(heap)), ring_(std::move(ring)), record_(record), on_host_(on_host) {}

    // The Routed, and whether the call is over; None if this is not a plain call of a kind that there was before.
    Result dispatch(py::object rounds, py::handle options, py::handle x, py::handle topk_idx, py::handle topk_weights, py::handle scales,
                    py::handle max_rows, py::object handle, py::handle sync, py::handle gradients, py::handle call, py::handle layer) {
        const Known& known = Known::instance();
        if (failed() || !(sync.is_none() || PyBool_Check(sync.ptr()))) return nothing_;
        const bool waits = sync.is_none() ? on_host_ : sync.ptr() == Py_True, repeats = !handle.is_none();
        if (repeats && !(is_from(known, handle, rounds) && topk_idx.is_none() && topk_weights.is_none())) return nothing_;
        const py::object layout = repeats ? get(get(handle, known.plan), known.layout) : get(options, known.layout);
        const py::object plans = plans_of(py::make_tuple(layout, options, repeats, false, false, false, false, gradients, call, layer));
        if (!plans) return nothing_;
        const DispatchTensors given(x, scales, topk_idx, topk_weights);
        if (!given.readable() || any_requires_grad(known, x, topk_weights)) return nothing_;
        const DispatchInputs inputs = given.get();
        for (const py::handle plan_object : py::reinterpret_borrow<py::list>(plans)) {
            const py::object plan = py::reinterpret_borrow<py::object>(plan_object), native = get(plan, known.native);
            const auto& prepared = native.cast<const PreparedDispatch&>();
            if (!prepared.takes(inputs)) continue;
            const i32 tokens = static_cast<i32>(inputs.x->shape[0]);
            const std::shared_ptr<Runner> runner = ready(prepared.runs, tokens, prepared.workers(tokens));
            if (runner == nullptr) return nothing_;
            std::shared_ptr<Block> payload, kept;
            std::optional<DispatchArgs> args;
            if (repeats) {
                const py::object earlier = get(handle, known.args), tables = get(handle, known.block);
                const auto& before = earlier.cast<const DispatchArgs&>();
                if (py::isinstance<Block>(tables) && !stays(tables.cast<const Block&>())) return nothing_;
                if (!(payload = rows(prepared.payload_bytes(before.max_rows)))) return nothing_;
                args = prepared.repeat(*payload, before, inputs);
            } else {
                const std::optional<i32> room = room_for(prepared, max_rows);
                if (!room) return nothing_;
                const u64 table_bytes = prepared.kept_bytes(*room), row_bytes = prepared.payload_bytes(*room);
                if (table_bytes + row_bytes > heap_->reserve || !(kept = heap_->arena->allocate(table_bytes)) || !stays(*kept))
                    return nothing_;
                if (!(payload = rows(row_bytes))) return nothing_;
                args = prepared.bind(*payload, *kept, *room, inputs);
                if (args && !max_rows.is_none() && !waits && args->layout == static_cast<i32>(Layout::flat)) args->clear_rows = *room;
            }
            if (!args) return nothing_;
            const py::object bound = py::cast(std::move(*args)), rows_here = py::cast(payload);
            if (!repeats) handle = new_handle(known, rounds, plan, bound, py::cast(kept));
            const py::object routed = new_routed(known, handle, plan, bound, rows_here, waits);
            auto& running = bound.cast<DispatchArgs&>();
            try {
                run(*runner, prepared.kind, running);
            } catch (py::error_already_set&) {  // peers may still write there
                get(get(rounds, known.unfinished), known.extend)(py::make_tuple(rows_here, get(handle, known.block)));
                throw;
            }
            if (!on_host_) return py::make_tuple(routed, !waits);
            if (failed()) return py::make_tuple(routed, false);
            if (waits && !repeats && running.layout != static_cast<i32>(Layout::batched)) trim(running, *payload);
            return py::make_tuple(routed, true);
        }
        return nothing_;
    }

    // What the combine returns, and whether it is over; None as of dispatch().
    Result combine(const py::object& rounds, py::handle options, py::handle y, const py::object& handle, py::object out, py::handle bias,
                   py::handle weight_grads, py::handle topk_weights, py::handle sum_grads, py::handle bias_first, py::handle gradients,
                   py::handle call, py::handle layer) {
        const Known& known = Known::instance();
        if (failed() || !is_from(known, handle, rounds)) return nothing_;
        const py::object earlier = get(handle, known.args);
        const auto& dispatch = earlier.cast<const DispatchArgs&>();
        if (dispatch.part == static_cast<i32>(Part::begin)) return nothing_;
        const bool gives_out = !out.is_none();
        CombineArguments given(y, out, bias, weight_grads, py::none(), topk_weights);
        if (y.is_none() || !given.readable() || any_requires_grad(known, y, out, bias, weight_grads, topk_weights)) return nothing_;
        const py::object layout = get(get(handle, known.plan), known.layout);
        const py::object plans =
            plans_of(py::make_tuple(layout, get(y, known.dtype), options, sum_grads, bias_first, gradients, call, layer));
        if (!plans) return nothing_;
        if (topk_weights.is_none() && get(options, known.weighted).ptr() != Py_False && !weights_are_there(known, handle)) return nothing_;
        CombineTensors tensors = given.get();
        for (const py::handle plan : py::reinterpret_borrow<py::list>(plans)) {
            const py::object native = get(plan, known.native);
            const auto& prepared = native.cast<const PreparedCombine&>();
            if (!prepared.takes(dispatch, tensors)) continue;
            const i32 tokens = dispatch.num_tokens;
            const std::shared_ptr<Runner> runner = ready(prepared.runs, tokens, prepared.workers(tokens));
            if (runner == nullptr) return nothing_;
            const bool in_window = py::isinstance<Block>(get(handle, known.block));
            if (!in_window && prepared.peers_read_weights && !prepared.in_window(dispatch.route.row_weights)) return nothing_;
            py::object grads = py::none();
            if (!gives_out) out = new_empty(known, prepared.like_out, tokens, prepared.args().hidden);
            if (!weight_grads.is_none()) grads = new_empty(known, prepared.like_grads, tokens, dispatch.ctx.shape.topk);
            const Argument to(out), grads_to(grads);
            tensors.out = to.get();
            tensors.out_weight_grads = grads_to.get();
            std::shared_ptr<Block> reduced;
            if (const u64 bytes = prepared.reduced_bytes(dispatch)) reduced = heap_->arena->allocate(bytes, heap_->end);
            const u64 place = reduced == nullptr ? 0 : window_of(dispatch.ctx, dispatch.ctx.rank) + reduced->offset();
            const std::optional<CombineArgs> args = prepared.bind(dispatch, tensors, place);
            if (!to.readable() || !grads_to.readable() || !args) return nothing_;
            if (gives_out) known.increment_version(out);
            run(*runner, prepared.kind, *args);
            const bool over = !on_host_ || !failed();
            return py::make_tuple(grads.is_none() ? out : py::object(py::make_tuple(out, grads)), over);
        }
        return nothing_;
    }

  private:
    // True if a round has left a failure behind that has not been raised yet.
    bool failed() const { return load_acquire(&reinterpret_cast<const FailureRecord*>(record_)->code) != 0; }

    static bool is_from(const Known& known, py::handle handle, const py::object& rounds) {
        return is_a(handle, known.handle_type) && get(handle, known.rounds).is(rounds);
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

    bool stays(const Block& block) const { return block.end() <= heap_->end; }

    // A block that stays for rows; null if there is no such room.
    std::shared_ptr<Block> rows(u64 bytes) const {
        if (bytes > heap_->reserve) return nullptr;
        auto block = heap_->arena->allocate(bytes, heap_->first_row);
        return block != nullptr && stays(*block) ? block : nullptr;
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

    static py::object new_handle(const Known& known, py::handle rounds, py::handle plan, py::handle args, py::handle block) {
        py::object handle = made(known.handle_type);
        set(handle, known.rounds, rounds);
        set(handle, known.plan, plan);
        set(handle, known.args, args);
        set(handle, known.block, block);
        set(handle, known.weights_read, Py_None);
        return handle;
    }

    static py::object new_routed(const Known& known, py::handle handle, py::handle plan, py::handle args, py::handle payload, bool sync) {
        py::object routed = made(known.routed_type);
        set(routed, known.handle, handle);
        set(routed, known.plan, plan);
        set(routed, known.args, args);
        set(routed, known.payload, payload);
        set(routed, known.sync, sync ? Py_True : Py_False);
        for (PyObject* const none : {known.dropped, known.back, known.inputs, known.check}) set(routed, none, Py_None);
        set(routed, known.tensors, py::dict());
        return routed;
    }

    template <class Args>
    void run(Runner& runner, const py::object& kind, const Args& args) {
        auto& ring = ring_.cast<CallRing&>();
        const i64 record = ring.begin(kind, args.num_tokens, false);
        runner.run(args);
        ring.end(record);
    }

    // Free the memory of rows that did not arrive.
    static void trim(DispatchArgs& args, Block& payload) {
        args.max_rows = *reinterpret_cast<const i32*>(args.num_rows);
        if (payload.bytes() == 0) return;
        const u64 used = args.out_x - payload.offset() + static_cast<u64>(args.max_rows) * static_cast<u64>(args.row_bytes);
        payload.shrink(std::max<u64>(1, used));
    }

    const Result nothing_ = py::make_tuple(py::none(), false);
    Plans plans_;
    std::shared_ptr<HeapParts> heap_;
    py::object ring_;
    u64 record_;
    bool on_host_;
};

}  // namespace

void bind_known_calls(py::module_& m) {
    py::class_<KnownCalls>(m, "KnownCalls", R"(Dispatches and combines of kinds that there were before.

Plain calls: no graph is captured, no round is verified or traced, and outputs stay in the window.
The arguments are those of moecomm.dispatch.dispatch and moecomm.combine.combine.

`plans`: lists of plans by the options of a call: moecomm.core.plans.
`ring`: the flight recorder's.
`record`: address of the failure record.
`on_host`: of a CPU rank.)")
        .def(py::init<Plans, std::shared_ptr<HeapParts>, py::object, u64, bool>(), py::arg("plans"), py::arg("heap"), py::arg("ring"),
             py::arg("record"), py::arg("on_host"))
        .def("dispatch", &KnownCalls::dispatch, py::arg("rounds"), py::arg("options"), py::arg("x"), py::arg("topk_idx"),
             py::arg("topk_weights"), py::arg("scales"), py::arg("max_rows"), py::arg("handle"), py::arg("sync"), py::arg("gradients"),
             py::arg("call"), py::arg("layer"), R"(Run a dispatch.  Returns a Routed, and whether the call is over.

The Routed is None, and nothing has been done, if this is no plain call, there is no plan for it, or an
argument can't be used.)")
        .def("combine", &KnownCalls::combine, py::arg("rounds"), py::arg("options"), py::arg("y"), py::arg("handle"), py::arg("out"),
             py::arg("bias"), py::arg("weight_grads"), py::arg("topk_weights"), py::arg("sum_grads"), py::arg("bias_first"),
             py::arg("gradients"), py::arg("call"), py::arg("layer"),
             "Run a combine.  Returns its result, and whether it is over; None as dispatch().");
}

}  // namespace moecomm::bindings
