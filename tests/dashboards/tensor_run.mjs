// A page whose run has parameters: the test server knows heads only, so what it answers is added to.
const perBlock = ['self_attn.q_proj.weight', 'self_attn.k_proj.weight', 'self_attn.v_proj.weight', 'self_attn.o_proj.weight',
  'mlp.gate.weight', 'input_layernorm.weight', 'post_attention_layernorm.weight'];

/** Names as a model of `blocks` blocks with `experts` experts each has them. */
export function tensorNames(blocks, experts) {
  const names = ['model.embed_tokens.weight'];
  for (let block = 0; block < blocks; block++) {
    for (const name of perBlock) names.push(`model.layers.${block}.${name}`);
    for (let expert = 0; expert < experts; expert++) names.push(`model.layers.${block}.mlp.experts.${expert}.up_proj.weight`);
  }
  return [...names, 'model.norm.weight', 'lm_head.weight'];
}

const every = 20;
const turns = 25;

/** Parameter `row` at a step: each has a value of its own, and takes its turn where the signal has turns. */
export function valueAt(signal, row, step) {
  if (signal === 'tensor_update_ratio') return (step / every) % turns === row % turns ? 1e-3 + row * 1e-6 : NaN;
  return row === 1 && signal === 'tensor_grad_norm' ? 0 : 0.01 + row / 1000 + step / 1e6;
}

/** Adds to what the server answers of runs: the signals of these parameters, and `load`, of 4 layers' 8 experts. */
export async function addTensors(page, names, alter = (run) => run) {
  const answers = { asked: [] };
  const body = (route) => route.request().postDataJSON();
  const json = (value) => (Number.isNaN(value) ? 'NaN' : value);
  await page.route('**/api/v1/GetRun', async (route) => {
    const response = await route.fetch();
    const run = await response.json();
    const parts = ['tensor_grad_sumsq', 'tensor_grad_max', 'tensor_change_sumsq', 'tensor_lag_sum', 'load', 'expert_load', 'router_entropy_sum'];
    const load = { name: 'load', granularity: 'GRANULARITY_EXPERT', merge: 'MERGE_MEAN', unit: '1', help: 'Share of the tokens.', layers: 4, heads: 8 };
    await route.fulfill({ response, json: alter({ ...run, description: { ...run.description, layout: { ...run.description.layout, experts: 8 } }, signals: [...run.signals, ...parts], own_signals: [load] }) });
  });
  await page.route('**/api/v1/GetMatrix', async (route) => {
    const { signal, step } = body(route);
    if (signal === 'load') {
      return route.fulfill({ json: { signal, step: '3700', layers: 4, heads: 8, values: Array.from({ length: 32 }, (_, i) => i / 32), names: [] } });
    }
    if (signal === 'expert_share') {
      const values = Array.from({ length: 96 }, (_, i) => (i === 21 ? 4 : 1));  // 12 layers; expert 5 of layer 2 takes too much.
      return route.fulfill({ json: { signal, step: '3700', layers: 12, heads: 8, values, names: [] } });
    }
    if (!signal.startsWith('tensor_')) return route.continue();
    answers.asked.push(Number(step));
    const at = Number(step) < 0 ? 3700 : Math.floor(Number(step) / every) * every;
    const values = names.map((_, row) => json(valueAt(signal, row, at)));
    return route.fulfill({ json: { signal, step: String(at), layers: names.length, heads: 1, values, names } });
  });
  await page.route('**/api/v1/GetSeries', async (route) => {
    const { series, ...rest } = body(route);
    const isOurs = (id) => id.name !== '' || id.signal === 'load' || /^(expert|router)_/.test(id.signal);
    const lacks = series.find((id) => id.name !== '' && !names.includes(id.name));
    if (lacks) return route.fulfill({ status: 404, json: { message: `series.name "${lacks.name}": the run has no such tensor` } });
    const response = await route.fetch({ postData: JSON.stringify({ ...rest, series: series.filter((id) => !isOurs(id)) }) });
    if (!response.ok()) return route.fulfill({ response });
    const answer = await response.json();
    const line = [0.1, 0.2, 0.3];
    const ours = series.filter(isOurs).map((id) => ({
      id, step: ['3660', '3680', '3700'], min: line, mean: line, max: line, downsampled: false, values: '3',
    }));
    return route.fulfill({ response, json: { series: [...ours, ...answer.series] } });
  });
  return answers;
}

const panelSignals = ['moment_lag_max', 'grad_saturated', 'skipped_steps', 'clip_factor', 'grad_norm', 'loss_scale', 'data_share', 'forward_seconds',
  'memory_peak', 'loss_sequence_max', 'loss_sequence_sum', 'loss_repeated_tokens', 'expert_load', 'router_entropy_sum', 'router_logit_max'];
/** What they are at first, and behind step 3,500. */
const courses = {
  moment_lag_max: [0.9, 2.7], grad_saturated: [0, 0], skipped_steps: [0, 1], clip_factor: [1, 0.4], loss_scale: [65536, 16384], data_share: [0.08, 0.1],
  forward_seconds: [0.3, 0.31], memory_peak: [70 * 2 ** 30, 71 * 2 ** 30], loss_sequence_max: [5, 11], loss_sequence_mean: [3.1, 3.2],
  loss_repeated_share: [0.03, 0.04], reward: [0.6, 0.3], kl: [0.1, 0.7], 'actor/pg_clipfrac': [0.1, 0.2], policy_entropy: [1.3, 0.8], queue_depth: [9, 9],
};
const wavers = (signal) => !['skipped_steps', 'clip_factor', 'loss_scale', 'memory_peak'].includes(signal);
const falls = 'OWN_PAST_FALLS';
const rises = 'OWN_PAST_RISES';
const ownOfRun = { reward: { low: -1, past: falls }, kl: { high: 0.5, past: rises }, 'actor/pg_clipfrac': { low: 0, high: 1, past: rises },
  policy_entropy: { past: falls }, queue_depth: {} };

/** Adds to what the server answers of runs: an optimizer, 4 layers of 8 experts of which the second has no router, sequences and rewards. */
export async function addPanels(page) {
  const body = (route) => route.request().postDataJSON();
  await page.route('**/api/v1/GetRun', async (route) => {
    const response = await route.fetch();
    const run = await response.json();
    const common = { granularity: 'GRANULARITY_RUN', merge: 'MERGE_MEAN', unit: '1', help: '', layers: 1, heads: 1, past: 'OWN_PAST_UNSPECIFIED' };
    const own = Object.entries(ownOfRun).map(([name, limits]) => ({ name, ...common, ...limits }));
    const layout = { ...run.description.layout, experts: 8 };
    await route.fulfill({ response, json: { ...run, description: { ...run.description, layout }, own_signals: own,
      signals: [...run.signals, ...panelSignals, ...Object.keys(ownOfRun)] } });
  });
  const matrix = (signal, heads, value) => ({ signal, step: '3700', layers: 4, heads, names: [],
    values: Array.from({ length: 4 * heads }, (_, i) => (Math.floor(i / heads) === 1 ? 'NaN' : value(Math.floor(i / heads), i % heads))) });
  const matrices = {
    // Layer 2 sends nothing to expert 3, and most to expert 6.
    expert_share: () => matrix('expert_share', 8, (layer, expert) => (layer !== 2 ? 0.9 + expert / 35 : expert === 6 ? 3.5 : expert === 3 ? 0 : 0.75)),
    router_entropy_share: () => matrix('router_entropy_share', 1, (layer) => 0.9 - layer / 10),
    router_logit_max: () => matrix('router_logit_max', 1, (layer) => 10 + layer),
  };
  await page.route('**/api/v1/GetMatrix', (route) => {
    const found = matrices[body(route).signal];
    return found ? route.fulfill({ json: found() }) : route.continue();
  });
  await page.route('**/api/v1/GetSeries', async (route) => {
    const { series, ...rest } = body(route);
    const isOurs = ({ signal }) => signal in ownOfRun || /^(expert|router)_/.test(signal) ||
      (signal !== 'grad_norm' && [...panelSignals, 'loss_sequence_mean', 'loss_repeated_share'].includes(signal));
    const response = await route.fetch({ postData: JSON.stringify({ ...rest, series: series.filter((id) => !isOurs(id)) }) });
    if (!response.ok()) return route.fulfill({ response });
    const answer = await response.json();
    const steps = Array.from({ length: 186 }, (_, i) => 20 * i);
    const ours = series.filter(isOurs).map((id) => {
      const [before, behind] = courses[id.signal] ?? [1, 1];
      const line = steps.map((step) => (step > 3500 ? behind : before) * (1 + (wavers(id.signal) ? 0.05 * Math.sin(step * 0.9 + id.signal.length) : 0)));
      return { id, step: steps.map(String), min: line, mean: line, max: line, downsampled: false, values: '186' };
    });
    return route.fulfill({ response, json: { series: [...ours, ...answer.series] } });
  });
  await page.route('**/api/v1/ListEvents', (route) => {
    const event = { attempt: 0, kind: 'EVENT_KIND_ANNOTATION', time_unix_ns: '1' };
    const events = [
      { ...event, step: '3000', value: 5, text: 'largest losses of sequences: 5 0011223344556677' },
      { ...event, step: '3660', value: 11.25, text: 'largest losses of sequences: 11.25 9af03c5512d07be4, 4.31 a book, page 7, nan' },
      { ...event, step: '3680', value: 0, text: 'a person has looked at it' },
    ];
    return route.fulfill({ json: { events, total: '3', next_after: '0' } });
  });
}

/** Adds to the evidence of the run's first alert. */
export async function addEvidence(page, evidence) {
  const rest = { value: 0, threshold: 1, baseline: 'NaN', first_step: '10', detector: 'still' };
  await page.route('**/api/v1/ListAlerts', async (route) => {
    const response = await route.fetch();
    const answer = await response.json();
    answer.alerts[0]?.last.evidence.push(...evidence.map((piece) => ({ ...rest, ...piece })));
    await route.fulfill({ response, json: answer });
  });
}

/** Rank 5 has gradients four times as large from step 3,000 on, rank 9 those of no data, and rank 7 no number at last. */
function normOf(rank, step) {
  if (rank === 7 && step >= 3700) return 'NaN';
  const usual = 1 + rank / 1e5;
  return rank === 5 && step >= 3000 ? 4 * usual : rank === 9 ? usual / 10 : usual;
}

/** Adds to what the server answers of runs: the norms of `ranks` ranks' own gradients, a sample every 20 steps. Says what was asked. */
export async function addRanks(page, ranks) {
  const asked = { matrices: [], series: [] };
  const body = (route) => route.request().postDataJSON();
  await page.route('**/api/v1/GetRun', async (route) => {
    const response = await route.fetch();
    const run = await response.json();
    await route.fulfill({ response, json: { ...run, signals: [...run.signals, 'rank_grad_norm', 'rank_grad_norm_max'] } });
  });
  await page.route('**/api/v1/GetMatrix', (route) => {
    const { signal, step } = body(route);
    if (!signal.startsWith('rank_')) return route.continue();
    const at = Number(step) < 0 ? 3700 : Math.min(3700, Math.floor(Number(step) / every) * every);
    asked.matrices.push(`${signal} ${step}`);
    return route.fulfill({ json: { signal, step: String(at), layers: ranks, heads: 1, names: [], values: Array.from({ length: ranks }, (_, rank) => normOf(rank, at)) } });
  });
  await page.route('**/api/v1/GetSeries', async (route) => {
    const { series } = body(route);
    if (!series[0]?.signal.startsWith('rank_')) return route.continue();
    asked.series.push(series.map(({ layer }) => layer).join());
    const steps = Array.from({ length: 186 }, (_, i) => every * i);
    await route.fulfill({ json: { series: series.map((id) => {
      const line = steps.map((step) => normOf(id.layer, step));
      return { id, step: steps.map(String), min: line, mean: line, max: line, downsampled: false, values: '186' };
    }) } });
  });
  return asked;
}
