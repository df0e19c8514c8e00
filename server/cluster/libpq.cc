#include "server/cluster/libpq.h"

#include <dlfcn.h>

#include <string>
#include <type_traits>

#include "absl/strings/str_cat.h"

namespace bellwether::server {
namespace {

constexpr char kLibrary[] = "libpq.so.5";

// "": found.
std::string Load(Libpq* pq) {
  void* const library = dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr)
    return absl::StrCat(kLibrary, " is not here, which cluster.* needs (Debian: apt install libpq5)");
  std::string why;
  const auto find = [&](const char* name, auto* function) {
    *function = reinterpret_cast<std::remove_pointer_t<decltype(function)>>(dlsym(library, name));
    if (*function == nullptr)
      why = absl::StrCat(kLibrary, " has no ", name, ": cluster.* needs that of PostgreSQL 14 or newer");
  };
#define BELLWETHER_FIND(name) find(#name, &pq->name);
  BELLWETHER_LIBPQ_FUNCTIONS(BELLWETHER_FIND)
#undef BELLWETHER_FIND
  return why;
}

}  // namespace

absl::StatusOr<const Libpq*> LoadLibpq() {
  static Libpq pq;
  static const std::string why = Load(&pq);
  if (!why.empty()) return absl::FailedPreconditionError(why);
  return &pq;
}

}  // namespace bellwether::server
