// libpq.h: PostgreSQL's client library, opened when it is first needed.
//
// Linked, it would bring LDAP and Kerberos to every machine that a bundle is
// copied to, for servers that never ask a PostgreSQL.
//
// Private to server/cluster.  Thread-safe.

#ifndef BELLWETHER_SERVER_CLUSTER_LIBPQ_H_
#define BELLWETHER_SERVER_CLUSTER_LIBPQ_H_

#include <libpq-fe.h>

#include "absl/status/statusor.h"

namespace bellwether::server {

// The functions of libpq that we call, by their own names and types.
// clang-format off
#define BELLWETHER_LIBPQ_FUNCTIONS(F)                                                \
  F(PQconnectStart) F(PQconnectPoll) F(PQfinish) F(PQstatus) F(PQsocket)             \
  F(PQerrorMessage) F(PQexec) F(PQsetnonblocking) F(PQflush) F(PQconsumeInput)       \
  F(PQisBusy) F(PQgetResult) F(PQclear) F(PQresultStatus) F(PQresultErrorMessage)    \
  F(PQresultErrorField) F(PQntuples) F(PQnfields) F(PQgetvalue) F(PQgetlength)       \
  F(PQgetisnull) F(PQcmdTuples) F(PQenterPipelineMode) F(PQpipelineSync)             \
  F(PQsendQueryParams) F(PQsetNoticeReceiver) F(PQtransactionStatus)
// clang-format on

struct Libpq {
#define BELLWETHER_DECLARE(name) decltype(&::name) name = nullptr;
  BELLWETHER_LIBPQ_FUNCTIONS(BELLWETHER_DECLARE)
#undef BELLWETHER_DECLARE
};

// FAILED_PRECONDITION: it is not here, or too old (before 14); says what to
// install.  It stays until the end.
absl::StatusOr<const Libpq*> LoadLibpq();

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_CLUSTER_LIBPQ_H_
