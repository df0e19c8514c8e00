#include "server/model/run_types.h"

#include <algorithm>

namespace bellwether::server {

std::vector<Layout::Difference> Layout::DifferencesOf(const Layout& other) const {
  std::vector<Difference> found = {{"layers", layers, other.layers},       {"heads", heads, other.heads},
                                   {"kv_heads", kv_heads, other.kv_heads}, {"head_dim", head_dim, other.head_dim},
                                   {"seq_len", seq_len, other.seq_len},    {"experts", experts, other.experts}};
  if (experts == 0 || other.experts == 0) found.pop_back();  // Not known yet.
  std::erase_if(found, [](const Difference& difference) { return difference.held == difference.offered; });
  return found;
}

void Layout::GrowTo(const Layout& other) {
  experts = std::max(experts, other.experts);
  ranks = std::max(ranks, other.ranks);
  tensors = std::max(tensors, other.tensors);
  modules = std::max(modules, other.modules);
  own = std::max(own, other.own);
}

}  // namespace bellwether::server
