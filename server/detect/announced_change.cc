#include "server/detect/announced_change.h"

#include <cmath>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "server/model/alert_words.h"

namespace bellwether::server {
namespace {

std::string RateWords(const AnnouncedChange& change) {
  const double factor = change.to / change.from;
  if (!std::isfinite(factor) || factor <= 0) {
    return std::isfinite(change.to) ? absl::StrFormat("the learning rate became %.3g", change.to)
                                    : "the learning rate changed";
  }
  // Two digits: a factor within a twentieth of ten is told as ten.
  const std::string up = absl::StrFormat("%.2g", factor);
  const std::string down = absl::StrFormat("%.2g", 1 / factor);
  if (up == "1") return "the learning rate changed";
  if (factor > 1) return up == "10" ? "the learning rate rose tenfold" : "the learning rate rose " + up + "-fold";
  return down == "10" ? "the learning rate fell to a tenth" : "the learning rate fell by a factor of " + down;
}

std::string To(const char* subject, double to) {
  return std::isfinite(to) && to > 0 ? absl::StrFormat("%s changed to %.6g", subject, to)
                                     : absl::StrCat(subject, " changed");
}

}  // namespace

bool IsChange(EventKind kind) {
  switch (kind) {
    case EventKind::kLearningRate:
    case EventKind::kRestore:
    case EventKind::kData:
    case EventKind::kBatchSize:
    case EventKind::kSequenceLength:
      return true;
    default:
      return false;
  }
}

std::string StepWords(int64_t step) { return CountText(step); }

std::string WordsOf(const AnnouncedChange& change) {
  const std::string at = " at step " + StepWords(change.step);
  switch (change.kind) {
    case EventKind::kLearningRate:
      return RateWords(change) + at;
    case EventKind::kRestore:
      return std::isfinite(change.to)
                 ? "the checkpoint of step " + StepWords(static_cast<int64_t>(change.to)) + " was restored" + at
                 : "a checkpoint was restored" + at;
    case EventKind::kData:
      return "the data changed" + at;
    case EventKind::kBatchSize:
      return To("the batch size", change.to) + at;
    case EventKind::kSequenceLength:
      return To("the sequence length", change.to) + at;
    default:
      return "something changed" + at;
  }
}

std::string AdviceOn(const AnnouncedChange& change) {
  const std::string back = "go back to a checkpoint from before step " + StepWords(change.step);
  switch (change.kind) {
    case EventKind::kLearningRate: {
      if (change.to < change.from) return "Look at the attention alerts of this run first; without one, " + back + ".";
      const std::string old =
          std::isfinite(change.from) ? absl::StrFormat("to %.3g", change.from) : std::string("to what it was");
      return absl::StrCat("Set the learning rate back ", old, ". If the loss stays up, ", back, ".");
    }
    case EventKind::kRestore:
      return "Check that the checkpoint is whole, and that the optimizer's state, the learning rate and the place in "
             "the data were restored with it.";
    case EventKind::kData:
      return absl::StrCat("Look at the data from step ", StepWords(change.step), " on: tokenizer, labels, masks. Then ",
                          back, ".");
    case EventKind::kBatchSize:
      return "Check that loss and gradients are means over the new batch and that the learning rate fits it; else " +
             back + ".";
    case EventKind::kSequenceLength:
      return "Check positions and masks at the new sequence length; else " + back + ".";
    default:
      return {};
  }
}

}  // namespace bellwether::server
