#include "server/detect/spectra.h"

#include <algorithm>
#include <limits>
#include <map>

#include "bellwether/kernels/gram_spectrum.h"

namespace bellwether::server {
namespace {

void SetValues(const kernels::GramSpectrum& spectrum, GramAnswer* answer) {
  if (answer->increment) {
    answer->count = 1;
    answer->values[0] = {SignalId::kGramIncrementRank, spectrum.effective_rank};
    return;
  }
  answer->count = 4;
  answer->values = {{{SignalId::kGramSigma, spectrum.sigma},
                     {SignalId::kGramStableRank, spectrum.stable_rank},
                     {SignalId::kGramEffectiveRank, spectrum.effective_rank},
                     {SignalId::kGramTop2Ratio, spectrum.top2_ratio}}};
}

GramAnswer::Outcome Classify(const GramTask& task) {
  const int64_t n = task.gram.n;
  auto kind = kernels::ClassifyGram(task.gram.upper->data(), n);
  if (task.increment() && kind != kernels::GramKind::kNonfinite) {
    const auto second = kernels::ClassifyGram(task.second.upper->data(), n);
    if (second != kernels::GramKind::kGram) kind = second;
  }
  switch (kind) {
    case kernels::GramKind::kGram:
      return GramAnswer::Outcome::kComputed;
    case kernels::GramKind::kNonfinite:
      return GramAnswer::Outcome::kNonfinite;
    case kernels::GramKind::kNotAGram:
      break;
  }
  return GramAnswer::Outcome::kNotAGram;
}

}  // namespace

GramAnswer AnswerTo(const GramTask& task, GramAnswer::Outcome outcome) {
  GramAnswer answer;
  answer.attempt = task.gram.attempt;
  answer.step = task.gram.step;
  answer.where = task.gram.where;
  answer.increment = task.increment();
  answer.outcome = outcome;
  return answer;
}

std::vector<GramAnswer> SolveGrams(std::span<const GramTask> tasks, SpectraBank* bank) {
  std::vector<GramAnswer> answers;
  std::map<int64_t, std::vector<size_t>> by_size;  // n -> tasks
  for (const GramTask& task : tasks) {
    answers.push_back(AnswerTo(task, Classify(task)));
    if (answers.back().outcome == GramAnswer::Outcome::kComputed) {
      by_size[task.gram.n].push_back(answers.size() - 1);
    } else if (answers.back().outcome == GramAnswer::Outcome::kNonfinite) {
      constexpr float nan = std::numeric_limits<float>::quiet_NaN();
      SetValues({nan, nan, nan, nan}, &answers.back());
    }
  }
  for (const auto& [n, members] : by_size) {
    const size_t each = static_cast<size_t>(n * n);
    std::vector<double> matrices(members.size() * each), values(members.size() * static_cast<size_t>(n)), scratch;
    for (size_t m = 0; m < members.size(); ++m) {
      const GramTask& task = tasks[members[m]];
      double* const matrix = matrices.data() + m * each;
      if (task.increment()) {
        scratch.resize(2 * each);
        kernels::IncrementMatrix(task.gram.upper->data(), task.second.upper->data(), n, matrix, scratch.data());
      } else {
        kernels::ExpandGram(task.gram.upper->data(), n, matrix);
      }
    }
    bank->Eigenvalues(n, static_cast<int64_t>(members.size()), matrices.data(), values.data());
    for (size_t m = 0; m < members.size(); ++m) {
      SetValues(kernels::SpectrumOf(values.data() + m * static_cast<size_t>(n), n), &answers[members[m]]);
    }
  }
  return answers;
}

}  // namespace bellwether::server
