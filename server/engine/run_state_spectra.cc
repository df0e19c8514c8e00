// The part of RunState for Gram matrices: their signals, and goodbyes that wait for
// those.

#include <utility>
#include <vector>

#include "server/engine/run_state.h"

namespace bellwether::server {

void RunState::ApplyGram(const ShippedGram& gram, Lsn lsn) {
  if (parts_.spectra == nullptr) return;
  // Its step stays open from here on; and a task holds it until the answer.
  if (!merge_.Hold(gram.attempt, gram.step, lsn, 0)) {
    if (lsn > saved_lsn_) CountGram("late");
    return;
  }
  if (lsn > saved_lsn_) Reopen();  // Its step is open.
  GramTask task;
  switch (grams_.Take(gram, &task)) {
    case GramAssembler::Outcome::kTask:
      task.run = record_.id;
      (void)merge_.Hold(gram.attempt, gram.step, lsn, 1);
      // In recovery the log may hold its answer.
      if (is_live_) {
        parts_.spectra->Submit(std::move(task));
      } else {
        unanswered_.push_back(std::move(task));
      }
      break;
    case GramAssembler::Outcome::kHeld:
      break;
    case GramAssembler::Outcome::kRepeated:
      CountGram("repeated");
      break;
    case GramAssembler::Outcome::kRefused:
      CountGram("refused");
      break;
  }
}

void RunState::ApplySpectra(const SpectraMessage& spectra) {
  std::vector<RankMerge::Cell> cells;
  for (const GramAnswer& answer : spectra.answers) {
    std::erase_if(unanswered_, [&](const GramTask& task) {
      return task.gram.attempt == answer.attempt && task.gram.step == answer.step && task.gram.where == answer.where &&
             task.increment() == answer.increment;
    });
    cells.clear();
    for (size_t i = 0; i < answer.count; ++i) {
      cells.push_back({answer.values[i].signal, answer.where.layer, answer.where.head, answer.values[i].value});
    }
    if (!merge_.Fill(answer.attempt, answer.step, cells, sink_)) CountGram("late");
  }
  ReleaseByes(false);
}

void RunState::SubmitUnanswered() {
  for (GramTask& task : unanswered_) parts_.spectra->Submit(std::move(task));
  unanswered_.clear();
}

void RunState::CountGram(const char* result, double count) {
  if (count > 0) parts_.counters->counter("bellwether_spectra_total", {{"result", result}})->Add(count);
}

void RunState::ApplyBye(uint32_t rank, const ByeMessage& bye) {
  byes_.emplace_back(rank, bye);
  ReleaseByes(false);
}

void RunState::ReleaseByes(bool all) {
  for (const auto& [rank, bye] : std::exchange(byes_, {})) {
    if (!all && merge_.Holding(rank)) {
      byes_.emplace_back(rank, bye);
    } else {
      LeaveRank(rank, bye);
    }
  }
}

}  // namespace bellwether::server
