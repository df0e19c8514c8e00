// status_macros.h: hands an absl::Status up.

#ifndef BELLWETHER_SERVER_UTIL_STATUS_MACROS_H_
#define BELLWETHER_SERVER_UTIL_STATUS_MACROS_H_

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#define BW_RETURN_IF_ERROR(expression)                                            \
  do {                                                                            \
    if (absl::Status bw_status = (expression); !bw_status.ok()) return bw_status; \
  } while (false)

#define BW_CONCAT_INNER(a, b) a##b
#define BW_CONCAT(a, b) BW_CONCAT_INNER(a, b)
#define BW_ASSIGN_OR_RETURN(target, expression) \
  BW_ASSIGN_OR_RETURN_INNER(BW_CONCAT(bw_statusor_, __LINE__), target, expression)
#define BW_ASSIGN_OR_RETURN_INNER(statusor, target, expression) \
  auto statusor = (expression);                                 \
  if (!statusor.ok()) return statusor.status();                 \
  target = std::move(statusor).value()

#endif  // BELLWETHER_SERVER_UTIL_STATUS_MACROS_H_
