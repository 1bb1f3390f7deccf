// Calls that take a turn.  Python runs signal handlers between instructions of its own, and what they raise may end a call anywhere in
// Python: so what takes the turn and what gives it back is native, and lives on the stack of the frame that makes the call.
#include "turn.h"

#include <pybind11/pybind11.h>

#include <memory>
#include <new>
#include <utility>

#include "module.h"

namespace py = pybind11;

namespace moecomm::bindings {
namespace {

constexpr double kPollS = 0.001;

py::object name(const char* text) { return py::reinterpret_steal<py::object>(PyUnicode_InternFromString(text)); }

// Methods of the owner of a turn.
struct Methods {
    const py::object turn = name("turn"), begin_call = name("_begin_call"), call_failed = name("_call_failed"),
                     count_refused = name("_count_refused"), interrupted = name("_interrupted"), raised = name("_raised"),
                     refuse = name("_refuse"), release = name("_release");
};

template <class... Arguments>
py::object call_method(const py::object& owner, const py::object& method, Arguments... given) {
    PyObject* const arguments[] = {owner.ptr(), given...};
    auto found = py::reinterpret_steal<py::object>(PyObject_VectorcallMethod(method.ptr(), arguments, sizeof...(given) + 1, nullptr));
    if (!found) throw py::error_already_set();
    return found;
}

PyObject* boolean(bool value) { return value ? Py_True : Py_False; }

// A call of an object with a turn, as a context.  Whatever ends the block, or the frame that would have run it, ends the call.
class Call {
  public:
    Call(const Methods& methods, py::object owner, py::object rounds, py::object note, bool outer)
        : methods_(methods), owner_(std::move(owner)), rounds_(std::move(rounds)), note_(std::move(note)), outer_(outer) {
        const auto turn = py::reinterpret_steal<py::object>(PyObject_GetAttr(owner_.ptr(), methods_.turn.ptr()));
        if (!turn) throw py::error_already_set();
        turn_ = turn.cast<std::shared_ptr<Turn>>();
        count_ = rounds_.cast<i64>();
    }
    Call(const Call&) = delete;
    Call& operator=(const Call&) = delete;
    ~Call() {
        if (!held_) return;  // else nobody has called exit(): the frame has ended between two instructions
        const py::error_scope propagating;
        miss(Py_None);
        end_quietly();
    }

    void enter() {
        thread_ = PyThread_get_thread_ident();
        if (!turn_->take()) refuse();
        if (turn_->shared ? outer_ && turn_->depth > 0 : turn_->running > 0) {
            turn_->give_back(thread_);
            refuse();
        }
        const bool nested = turn_->depth > 0;
        ++(outer_ ? turn_->depth : turn_->running);
        held_ = true;
        until_ = turn_->made + count_;
        failed_ = turn_->failed;
        several_ = std::exchange(turn_->several, false) && nested;
        try {
            if (turn_->uncounted > 0 && !nested) call_method(owner_, methods_.count_refused);
            call_method(owner_, methods_.begin_call, rounds_.ptr(), boolean(nested), note_.ptr());
        } catch (py::error_already_set& error) {
            miss(error.value().ptr());
            end_quietly();
            throw;
        }
    }

    // `error`: that ends the block; null: none does.
    void exit(PyObject* error) {
        if (!held_) return;
        bool missing = true;
        try {
            if (error != nullptr) {
                missing = missed(error);
                if (missing) call_method(owner_, methods_.interrupted, error, note_.ptr());
                call_method(owner_, methods_.call_failed, error, boolean(missing && turn_->failed == failed_), note_.ptr());
            }
        } catch (py::error_already_set& other) {  // a signal handler's, too: what the caller gets in the place of `error`
            if (missing) {
                if (turn_->failed == failed_) ++turn_->uncounted;
                end_waits(error);
                end_waits(other.value().ptr());
            }
            end_quietly();
            throw;
        }
        end();
    }

  private:
    [[noreturn]] void refuse() {
        if (count_ > 0) ++turn_->uncounted;
        call_method(owner_, methods_.refuse);
        throw py::type_error("_refuse() raises an error");
    }
    // Note a call that ends without _call_failed(), if it counts as failed, and end the waits of its peers.
    void miss(PyObject* error) {
        try {
            if (!missed(error)) return;
        } catch (py::error_already_set&) {  // a signal handler's
        }
        ++turn_->uncounted;
        end_waits(error);
    }
    // End the waits of peers, if a signal handler may have raised `error`.
    void end_waits(PyObject* error) {
        try {
            call_method(owner_, methods_.interrupted, error, note_.ptr());
        } catch (py::error_already_set&) {  // another error is on its way
        }
    }
    // True if the call has not made all its rounds, and neither it nor a call in it has been counted.  Where it makes
    // nobody knows how many, an error that a round has left behind ends it on every rank.
    bool missed(PyObject* error) const {
        if (turn_->failed != failed_) return false;
        if (turn_->made < until_) return true;
        return turn_->several && (error == Py_None || call_method(owner_, methods_.raised).ptr() != error);
    }
    // Give the turn back.  The object closes first, if it is to and no other call is under way.
    void end() {
        held_ = false;
        --(outer_ ? turn_->depth : turn_->running);
        turn_->several = several_;
        try {
            if (turn_->closing && turn_->ends(outer_)) call_method(owner_, methods_.release);
        } catch (py::error_already_set&) {
            turn_->give_back(thread_);
            throw;
        }
        turn_->give_back(thread_);
    }
    // end(), while another error is on its way.
    void end_quietly() {
        try {
            end();
        } catch (py::error_already_set& error) {
            error.discard_as_unraisable("the end of a call");
        }
    }

    const Methods& methods_;
    const py::object owner_, rounds_, note_;
    const bool outer_;
    std::shared_ptr<Turn> turn_;
    i64 count_, until_ = 0, failed_ = 0;
    unsigned long thread_ = 0;
    bool held_ = false, several_ = false;  // several_: Turn::several of the call that this one is part of
};

// The type of Call in Python.  One of pybind11 would take longer to make, enter and leave than all that a call does in between.
struct CallObject {
    PyObject_HEAD Call call;
};

Methods* methods = nullptr;

// Run native code for Python; null: it has raised an error.
template <class Run>
PyObject* guarded(const Run& run) {
    try {
        return run();
    } catch (py::error_already_set& error) {
        error.restore();
    } catch (const py::cast_error&) {
        PyErr_SetString(PyExc_TypeError, "Call(owner, rounds, note, outer): a number of rounds, and an owner with a Turn");
    } catch (const py::builtin_exception& error) {
        error.set_error();
    }
    return nullptr;
}

PyObject* make_call(PyObject* type, PyObject* const* given, size_t count, PyObject* names) {
    return guarded([&]() -> PyObject* {
        const auto number = PyVectorcall_NARGS(count);
        if (number < 2 || number > 4 || names != nullptr) throw py::type_error("Call(owner, rounds, note=None, outer=False), by position");
        auto* const kind = reinterpret_cast<PyTypeObject*>(type);
        auto object = py::reinterpret_steal<py::object>(kind->tp_alloc(kind, 0));
        if (!object) throw py::error_already_set();
        const auto at = [&](Py_ssize_t index) { return py::reinterpret_borrow<py::object>(index < number ? given[index] : Py_None); };
        const bool outer = number == 4 && given[3] == Py_True;
        try {
            new (&reinterpret_cast<CallObject*>(object.ptr())->call) Call(*methods, at(0), at(1), at(2), outer);
        } catch (...) {
            PyObject* const memory = object.release().ptr();  // which holds no Call
            kind->tp_free(memory);
            Py_DECREF(type);
            throw;
        }
        return object.release().ptr();
    });
}

// A `__new__` of its own: that of object would make a Call that holds nothing, and torch.compile takes types without one for contexts that
// it can trace.
PyObject* new_call(PyTypeObject* type, PyObject* given, PyObject* names) {
    const bool named = names != nullptr && PyDict_GET_SIZE(names) != 0;
    PyObject* const* const first = &PyTuple_GET_ITEM(given, 0);
    return make_call(reinterpret_cast<PyObject*>(type), first, static_cast<size_t>(PyTuple_GET_SIZE(given)), named ? names : nullptr);
}

void free_call(PyObject* self) {
    PyTypeObject* const type = Py_TYPE(self);
    reinterpret_cast<CallObject*>(self)->call.~Call();
    type->tp_free(self);
    Py_DECREF(type);
}

PyObject* enter_call(PyObject* self, PyObject*) {
    return guarded([&] {
        reinterpret_cast<CallObject*>(self)->call.enter();
        return py::none().release().ptr();
    });
}

PyObject* exit_call(PyObject* self, PyObject* const* given, Py_ssize_t count) {
    return guarded([&] {
        if (count != 3) throw py::type_error("__exit__(kind, error, trace)");
        reinterpret_cast<CallObject*>(self)->call.exit(given[1] == Py_None ? nullptr : given[1]);
        return py::none().release().ptr();
    });
}

PyMethodDef call_methods[] = {
    {"__enter__", enter_call, METH_NOARGS, "__enter__(self: moecomm._native.Call) -> None\n"},
    {"__exit__", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(exit_call)), METH_FASTCALL,
     "__exit__(self: moecomm._native.Call, kind: object, error: object, trace: object) -> None\n"},
    {nullptr, nullptr, 0, nullptr},
};

constexpr const char* kCallDoc = R"(Call(owner, rounds, note=None, outer=False, /)
--

Context of a call of an object: in its block, this thread has the object's turn.

Another call, in another thread or below a signal handler, is refused meanwhile.  The turn is given back by whatever
ends the block or its frame, an exception of a signal handler between any two instructions included.

`owner`: an object with a `turn`, a Turn, and these methods:
    `_refuse()`: raise the error of a call that is refused.
    `_begin_call(rounds, nested, note)`: begin a call that has the turn.  `nested`: another one consists of it.
    `_count_refused()`: count the calls that Turn.uncounted says.
    `_raised()`: return the last error that a round has left behind, or None.
    `_interrupted(error, note)`: the call ends in an error and counts as failed.  If a signal handler has raised it,
        peers do not know, and their waits are to end.  None: of an error that is not known, between instructions.
    `_call_failed(error, missed, note)`: likewise, after that.  `missed`: it counts as failed.
    `_release()`: close the object.
`rounds`: of the call.  An error before the last of them counts the call as failed, unless a call in it has.
`note`: the owner gets it back.
`outer`: the call consists of other calls of the same thread.  Of a shared turn: one such call at a time.)";

void bind_call(py::module_& m) {
    static PyType_Slot slots[] = {
        {Py_tp_new, reinterpret_cast<void*>(new_call)},
        {Py_tp_dealloc, reinterpret_cast<void*>(free_call)},
        {Py_tp_methods, call_methods},
        {Py_tp_doc, const_cast<char*>(kCallDoc)},
        {0, nullptr},
    };
    static PyType_Spec spec = {"moecomm._native.Call", sizeof(CallObject), 0, Py_TPFLAGS_DEFAULT, slots};
    if (methods == nullptr) methods = new Methods;  // as long as the process: interned strings
    auto type = py::reinterpret_steal<py::object>(PyType_FromSpec(&spec));
    if (!type) throw py::error_already_set();
    reinterpret_cast<PyTypeObject*>(type.ptr())->tp_vectorcall = make_call;
    m.add_object("Call", type);
}

// The turn without a call, awaited, as a context.
class Awaited {
  public:
    Awaited(std::shared_ptr<Turn> turn, py::object before) : turn_(std::move(turn)), before_(std::move(before)) {}
    Awaited(const Awaited&) = delete;
    Awaited& operator=(const Awaited&) = delete;
    ~Awaited() { exit(); }

    void enter() {
        if (!turn_->take_alone()) {
            before_();
            const py::object sleep = py::module_::import("time").attr("sleep");
            while (!turn_->take_alone()) sleep(kPollS);  // signal handlers run meanwhile
        }
        thread_ = PyThread_get_thread_ident();
        held_ = true;
    }
    void exit() {
        if (std::exchange(held_, false)) turn_->give_back(thread_);
    }

  private:
    const std::shared_ptr<Turn> turn_;
    const py::object before_;
    unsigned long thread_ = 0;
    bool held_ = false;
};

}  // namespace

void bind_turn(py::module_& m) {
    py::class_<Turn, std::shared_ptr<Turn>>(m, "Turn", R"(The threads in the calls of an object: see Call.

`shared`: several threads may be in calls at once.  Else one.
`made`: rounds of its calls.  `failed`: calls that failed before their last round, and are counted.
`uncounted`: calls that were refused, or have failed so and are yet to be counted.
`running`: calls under way that contain no other.  `depth`: those that consist of others.
`several`: the call under way makes rounds whose number is not known ahead, and is yet to make the last of them.
`closing`: the object closes when the calls under way end.)")
        .def(py::init<bool>(), py::arg("shared") = false)
        .def_readonly("running", &Turn::running)
        .def_readonly("depth", &Turn::depth)
        .def_readonly("uncounted", &Turn::uncounted)
        .def_readwrite("closing", &Turn::closing)
        .def_readwrite("several", &Turn::several)
        .def_readwrite("made", &Turn::made)
        .def_readwrite("failed", &Turn::failed)
        .def(
            "miss", [](Turn& turn) { ++turn.uncounted; }, "Note a call to be counted.")
        .def("counted", [](Turn& turn) { --turn.uncounted; }, "Note that one of the calls to be counted has been.");
    bind_call(m);
    py::class_<Awaited>(m, "AwaitedTurn", R"(Context that takes a turn without a call, and waits until no other thread has it.

`before`: called before the wait, if there is one.)")
        .def(py::init<std::shared_ptr<Turn>, py::object>(), py::arg("turn"), py::arg("before"))
        .def("__enter__", &Awaited::enter)
        .def(
            "__exit__", [](Awaited& awaited, const py::object&, const py::object&, const py::object&) { awaited.exit(); }, py::arg("kind"),
            py::arg("error"), py::arg("trace"));
}

}  // namespace moecomm::bindings
