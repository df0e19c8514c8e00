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
