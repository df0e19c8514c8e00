#include "server/detect/gram_assembler.h"

#include <utility>

namespace bellwether::server {

GramAssembler::Outcome GramAssembler::Take(const ShippedGram& gram, GramTask* task) {
  Step& step = steps_[{gram.attempt, gram.step}];
  if (step.seen.count({gram.where, gram.of}) > 0) return Outcome::kRepeated;
  if (step.seen.size() >= options_.grams_per_step_max) return Outcome::kRefused;
  step.seen.insert({gram.where, gram.of});
  *task = {};
  if (gram.of == GramOf::kQuery) {
    task->gram = gram;
    return Outcome::kTask;
  }
  const auto half = step.halves.find(gram.where);
  const size_t bytes = gram.upper->size() * sizeof(float);
  if (half == step.halves.end()) {
    if (held_bytes_ + bytes > options_.held_bytes_max) return Outcome::kRefused;
    held_bytes_ += bytes;
    step.halves[gram.where] = gram;
    return Outcome::kHeld;
  }
  task->gram = std::move(half->second);
  task->second = gram;
  held_bytes_ -= task->gram.upper->size() * sizeof(float);
  step.halves.erase(half);
  if (task->gram.n != gram.n) return Outcome::kRefused;
  if (gram.of == GramOf::kIncrementA) std::swap(task->gram, task->second);
  return Outcome::kTask;
}

size_t GramAssembler::Close(uint32_t attempt, int64_t step) {
  size_t given_up = 0;
  const auto end = steps_.upper_bound({attempt, step});
  for (auto at = steps_.begin(); at != end; at = steps_.erase(at)) {
    for (const auto& [where, half] : at->second.halves) {
      held_bytes_ -= half.upper->size() * sizeof(float);
      ++given_up;
    }
  }
  return given_up;
}

}  // namespace bellwether::server
