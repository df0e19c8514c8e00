// last_error.h: the sentence behind bw_last_error().

#ifndef BELLWETHER_CLIENT_LIB_SRC_LAST_ERROR_H_
#define BELLWETHER_CLIENT_LIB_SRC_LAST_ERROR_H_

namespace bellwether::client {

// printf into this thread's buffer of 256 bytes, cut at its end.
void SetLastError(const char* format, ...) __attribute__((format(printf, 1, 2)));

const char* LastError();

}  // namespace bellwether::client

#endif  // BELLWETHER_CLIENT_LIB_SRC_LAST_ERROR_H_
