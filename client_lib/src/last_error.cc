#include "client_lib/src/last_error.h"

#include <cstdarg>
#include <cstdio>

namespace bellwether::client {
namespace {

thread_local char last_error[256] = "";

}  // namespace

void SetLastError(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(last_error, sizeof(last_error), format, arguments);
  va_end(arguments);
}

const char* LastError() { return last_error; }

}  // namespace bellwether::client
