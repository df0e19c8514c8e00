// For the hook (client_lib/python/bellwether/_hook/functions): what function objects of
// CPython call while their calls are diverted.  Nothing of Python is linked: its addresses come from the hook.
// All of this is called with the interpreter locked.  A change of these functions raises BW_API_VERSION (client.h),
// by which the hook knows the library (tests/python/test_library_versions.py).

#include <cstddef>
#include <unordered_map>

#include "bellwether/client.h"

namespace {

using VectorCall = void* (*)(void* callable, void* const* arguments, size_t count, void* names);
using EvalFrame = void* (*)(void* thread, void* frame, int thrown);
using SetEvalFrame = void (*)(void* interpreter, EvalFrame frame);
using GetEvalFrame = EvalFrame (*)(void* interpreter);

VectorCall g_vector_call = nullptr;
void* g_target = nullptr;

VectorCall g_function_call = nullptr;

// How frames are run.  `set` is there only where calls from Python to Python otherwise never look into the
// function object.
struct Frames {
  void* interpreter = nullptr;
  EvalFrame plain = nullptr;
  GetEvalFrame get = nullptr;
  SetEvalFrame set = nullptr;
};
Frames g_frames;
int g_seeing = 0;  // Threads.

thread_local int t_depth = 0;            // Of forwards whose calls are to be seen.
thread_local bool t_inside = false;      // A target runs: what it calls is not seen.
thread_local void* t_plainly = nullptr;  // The function whose next call is its own, while t_inside.

struct Diverted {
  void* target = nullptr;
  bool left_to_python = false;  // By torch.compile, which never runs the function's frames.
};

// By function.  Never destroyed: functions are called while the process ends, too.
std::unordered_map<void*, Diverted>& Targets() {
  static auto* const all = new std::unordered_map<void*, Diverted>;
  return *all;
}

void* RunFrame(void* thread, void* frame, int thrown) { return g_frames.plain(thread, frame, thrown); }

EvalFrame FramesNow() { return g_frames.get(g_frames.interpreter); }

}  // namespace

extern "C" {

// `target` is called, by CPython's PyObject_Vectorcall, whenever bw_python_call is.  Both outlive all calls.
BW_EXPORT void bw_python_call_to(void* target, void* vector_call);
void bw_python_call_to(void* target, void* vector_call) {
  g_target = target;
  g_vector_call = reinterpret_cast<VectorCall>(vector_call);
}

// A vectorcallfunc: `arguments` and `names` are handed on as they are, and so is what comes back.
BW_EXPORT void* bw_python_call(void* callable, void* const* arguments, size_t count, void* names);
void* bw_python_call(void* /*callable*/, void* const* arguments, size_t count, void* names) {
  return g_vector_call(g_target, arguments, count, names);
}

// Calls of functions of Python: `function_call` is CPython's own way, _PyFunction_Vectorcall; `vector_call` its
// PyObject_Vectorcall.
BW_EXPORT void bw_python_functions(void* function_call, void* vector_call);
void bw_python_functions(void* function_call, void* vector_call) {
  g_function_call = reinterpret_cast<VectorCall>(function_call);
  g_vector_call = reinterpret_cast<VectorCall>(vector_call);
}

// How CPython runs frames: its own function, and those that get and set another (PEP 523).  With `set`, a
// function of ours that calls `plain` runs them while calls are seen: CPython 3.11 runs a function without
// looking at how it wants to be called, unless there is such a function.
BW_EXPORT void bw_python_frames(void* interpreter, void* plain, void* get, void* set);
void bw_python_frames(void* interpreter, void* plain, void* get, void* set) {
  g_frames = Frames{interpreter, reinterpret_cast<EvalFrame>(plain), reinterpret_cast<GetEvalFrame>(get),
                    reinterpret_cast<SetEvalFrame>(set)};
}

// From now on `target` is called for calls of `function` that are seen.  Both outlive all calls.
BW_EXPORT void bw_python_function_to(void* function, void* target);
void bw_python_function_to(void* function, void* target) { Targets()[function].target = target; }

// Of a function that has a target: torch.compile leaves its frames to Python.  So its calls are seen while
// torch.compile runs the frames, too.
BW_EXPORT void bw_python_function_left(void* function);
void bw_python_function_left(void* function) { Targets()[function].left_to_python = true; }

// For a target that runs: the next call of `function` in this thread is its own, and what it calls is seen.
// Where that call never comes here, this is forgotten when the target returns.
BW_EXPORT void bw_python_plainly(void* function);
void bw_python_plainly(void* function) { t_plainly = function; }

// Calls of this thread are seen until bw_python_leave() has come as often.
BW_EXPORT void bw_python_see(void);
void bw_python_see(void) {
  if (t_depth++ > 0 || g_seeing++ > 0 || g_frames.set == nullptr) return;
  // Another's function (torch.compile's, a debugger's) does as well, and stays.
  if (FramesNow() == g_frames.plain) g_frames.set(g_frames.interpreter, RunFrame);
}

BW_EXPORT void bw_python_leave(void);
void bw_python_leave(void) {
  if (--t_depth > 0 || --g_seeing > 0 || g_frames.set == nullptr) return;
  if (FramesNow() == RunFrame) g_frames.set(g_frames.interpreter, g_frames.plain);
}

// A vectorcallfunc for the functions that have a target.
BW_EXPORT void* bw_python_function_call(void* function, void* const* arguments, size_t count, void* names);
void* bw_python_function_call(void* function, void* const* arguments, size_t count, void* names) {
  if (!t_inside) t_plainly = nullptr;  // Of a target that has returned: this thread would see nothing any more.
  if (function == t_plainly) {
    t_plainly = nullptr;
    t_inside = false;
    void* const result = g_function_call(function, arguments, count, names);
    t_inside = true;
    return result;
  }
  if (t_depth == 0 || t_inside) return g_function_call(function, arguments, count, names);
  const Diverted& diverted = Targets().at(function);
  // torch.compile, while it traces or runs what it has made, takes the function's frames.
  const EvalFrame frames = diverted.left_to_python ? g_frames.plain : FramesNow();
  if (frames != RunFrame && frames != g_frames.plain) {
    return g_function_call(function, arguments, count, names);
  }
  t_inside = true;
  void* const result = g_vector_call(diverted.target, arguments, count, names);
  t_inside = false;
  return result;
}

}  // extern "C"
