// For the hook (client_lib/python/bellwether/_hook/native_call.py): what a function object of CPython calls
// while its calls are diverted.  Nothing of Python is linked: its addresses come from the hook.

#include <cstddef>

#include "bellwether/client.h"

namespace {

using VectorCall = void* (*)(void* callable, void* const* arguments, size_t count, void* names);

VectorCall g_vector_call = nullptr;
void* g_target = nullptr;

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

}  // extern "C"
