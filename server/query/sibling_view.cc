#include "server/query/sibling_view.h"

#include <algorithm>

namespace bellwether::server {
namespace {

bool SeesSiblings(const QueryStores& stores, const Grant* grant, RunId run) {
  if (grant == nullptr || grant->SeesAll()) return true;
  const RunSnapshotPtr snapshot = stores.runs->Get(run);
  if (snapshot == nullptr) return false;  // Of which kind it was is not known here.
  const auto siblings = stores.baselines->Siblings(KindOf(snapshot->record.description), run);
  return std::all_of(siblings.begin(), siblings.end(),
                     [grant](const auto& sibling) { return grant->Sees(sibling->name); });
}

void Clear(v1::Transition* transition) {
  transition->clear_siblings();
  for (v1::Evidence& evidence : *transition->mutable_evidence()) evidence.clear_siblings();
}

}  // namespace

void HideSiblings(const QueryStores& stores, const Grant* grant, RunId run, v1::Transition* transition) {
  if (!SeesSiblings(stores, grant, run)) Clear(transition);
}

void HideSiblings(const QueryStores& stores, const Grant* grant, RunId run, v1::Alert* alert) {
  if (SeesSiblings(stores, grant, run)) return;
  Clear(alert->mutable_last());
  for (v1::Transition& transition : *alert->mutable_history()) Clear(&transition);
}

}  // namespace bellwether::server
