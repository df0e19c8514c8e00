#include "server/model/run_types.h"

#include <algorithm>

namespace bellwether::server {

bool Layout::SameModel(const Layout& other) const {
  const bool experts_agree = experts == 0 || other.experts == 0 || experts == other.experts;
  return layers == other.layers && heads == other.heads && kv_heads == other.kv_heads && head_dim == other.head_dim &&
         seq_len == other.seq_len && experts_agree;
}

void Layout::GrowTo(const Layout& other) {
  experts = std::max(experts, other.experts);
  ranks = std::max(ranks, other.ranks);
  tensors = std::max(tensors, other.tensors);
  modules = std::max(modules, other.modules);
  own = std::max(own, other.own);
}

}  // namespace bellwether::server
