// open_page.h: the address of a server's page.

#ifndef BELLWETHER_CLI_OPEN_PAGE_H_
#define BELLWETHER_CLI_OPEN_PAGE_H_

#include <grpcpp/grpcpp.h>

#include <string>

#include "cli/connect.h"

namespace bellwether::cli {

// "https://host:7071/", without a token.  Empty: it serves none, or `*status` says why it is not known.
std::string PageOf(Connection* connection, grpc::Status* status);
// That of a run's own page; of all runs if `run` is empty.
std::string PageAddress(const std::string& page, const std::string& run);

}  // namespace bellwether::cli

#endif  // BELLWETHER_CLI_OPEN_PAGE_H_
