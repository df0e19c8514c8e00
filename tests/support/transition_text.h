// transition_text.h: transitions as text, to be compared whole.

#ifndef BELLWETHER_TESTS_SUPPORT_TRANSITION_TEXT_H_
#define BELLWETHER_TESTS_SUPPORT_TRANSITION_TEXT_H_

#include <string>
#include <vector>

#include "server/model/alert_transition.h"

namespace bellwether::server {

// Everything of a transition that a reader sees.
inline std::string TextOf(const AlertTransition& t) {
  std::string text = t.key + " k" + std::to_string(t.k) + " state" + std::to_string(static_cast<int>(t.state)) +
                     " sev" + std::to_string(static_cast<int>(t.severity)) + " stage" + std::to_string(t.stage) +
                     " at" + std::to_string(t.step) + " " + t.summary + " " + t.cause + " " + t.advice;
  for (const Head& head : t.heads) text.append(" ").append(std::to_string(head.layer * 10000 + head.head));
  for (const Evidence& e : t.evidence) text.append(" ").append(e.signal).append("=").append(std::to_string(e.value));
  return text;
}

inline std::vector<std::string> TextsOf(const std::vector<AlertTransition>& transitions) {
  std::vector<std::string> texts;
  for (const AlertTransition& t : transitions) texts.push_back(TextOf(t));
  return texts;
}

}  // namespace bellwether::server

#endif  // BELLWETHER_TESTS_SUPPORT_TRANSITION_TEXT_H_
