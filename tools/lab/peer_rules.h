// peer_rules.h: the rules that others use, to be judged on the same runs.
//
//   loss 6 sigma      OLMo-core: loss above mean + 6 standard deviations of 128
//   loss 2x mean      LLM Foundry: loss above twice the mean of 100, 5 times in a row
//   loss 10x max      Megatron: loss above 10 times the largest of the first 100
//   gradient z 2.5    ZClip: gradient norm 2.5 standard deviations above its
//                     exponential mean (0.97), as statistics: nothing is clipped
//   gradient 2x mean  a dashboard's threshold: gradient norm above twice its mean
//                     of 100
//   max logit 100     any head's largest score above 100
//
// Each counts an alarm when it begins to fire, and again after 100 steps of
// silence.  Values that are not finite fire all of a signal's rules.  None
// speaks in its first 100 values.  Not thread-safe.

#ifndef BELLWETHER_TOOLS_LAB_PEER_RULES_H_
#define BELLWETHER_TOOLS_LAB_PEER_RULES_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "server/model/step_sample.h"

namespace bellwether::server {

class PeerRule {
 public:
  explicit PeerRule(std::string name) : name_(std::move(name)) {}
  virtual ~PeerRule() = default;

  // Samples in order of their steps.
  void Observe(const StepSample& sample);

  const std::string& name() const { return name_; }
  const std::vector<int64_t>& alarms() const { return alarms_; }  // Steps.

 private:
  // False if the sample says nothing of its signal.
  virtual bool Fires(const StepSample& sample) = 0;

  const std::string name_;
  std::vector<int64_t> alarms_;
  int64_t fired_at_ = -1;
};

std::vector<std::unique_ptr<PeerRule>> MakePeerRules();

}  // namespace bellwether::server

#endif  // BELLWETHER_TOOLS_LAB_PEER_RULES_H_
