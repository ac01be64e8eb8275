'use strict';
// Everything that comes from the job goes in as text: no string is ever read as HTML.
const $ = (id) => document.getElementById(id);
const asked = new URLSearchParams(location.search);
const token = asked.get('token') || '';
const ask = async (path) => {
  const answer = await fetch(path, { headers: { Authorization: `Bearer ${token}` }, cache: 'no-store' });
  if (!answer.ok) throw new Error(`${answer.status}: ${await answer.text()}`);
  return answer;
};
const node = (tag, attributes = {}, ...children) => {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
};
const shape = (tag, attributes = {}, text = null) => {
  const made = document.createElementNS('http://www.w3.org/2000/svg', tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== null) made.textContent = text;
  return made;
};
const NONE = '–';
const fixed = (value) => value.toFixed(value < 10 ? 2 : value < 100 ? 1 : 0);
const known = (value, show) => (value === null || value === undefined ? NONE : show(value));
const ms = (value) => known(value, (v) => (v === 0 ? '0 ms' : v >= 10000 ? `${fixed(v / 1000)} s` : v < 1 ? `${fixed(v * 1000)} µs` : `${fixed(v)} ms`));
const count = (value) => known(value, (v) => v.toLocaleString('en'));
const percent = (value) => known(value, (v) => `${Math.round(100 * v)} %`);
const bytes = (value) => known(value, (v) => {
  const units = ['B', 'KiB', 'MiB', 'GiB', 'TiB'];
  const power = v < 1 ? 0 : Math.min(4, Math.floor(Math.log2(v) / 10));
  return `${power === 0 ? v : fixed(v / 1024 ** power)} ${units[power]}`;
});
const lasted = (seconds) => {
  const [h, m, s] = [seconds / 3600, (seconds / 60) % 60, seconds % 60].map(Math.floor);
  return h ? `${h} h ${m} min` : m ? `${m} min ${s} s` : `${s} s`;
};

const showHead = (seen) => {
  document.title = `${seen.state} · ${seen.job.program}`;
  $('program').textContent = seen.job.program;
  $('state').textContent = seen.state;
  const isBad = seen.state === 'restarting' || (seen.ended && seen.ended.code !== 0);
  $('state').className = `state ${isBad ? 'bad' : seen.state}`;
  $('pipeline').textContent = seen.job.pipeline;
  $('where').textContent = `process ${seen.job.pid} on ${seen.job.host} · for ${lasted(seen.elapsed_s)} · pp ${seen.job.pp_version}`;
  const sentence = (seen.ended && seen.ended.sentence) || (seen.fault && seen.fault.sentence) || '';
  $('fault').textContent = sentence;
  $('fault').hidden = sentence === '';
};

const showFigures = ({ totals, recent, job, training }) => {
  const slowest = recent.slowest_stage === null ? '' : `slowest stage ${recent.slowest_stage}: ${ms(recent.slowest_stage_ms)}`;
  const queues = `${count(recent.source_queue)} / ${count(recent.sink_queue)}`;
  const rows = [
    ['frames', 'Frames per second', known(recent.frames_per_second, fixed), `${count(totals.frames)} frames`],
    ['period', 'Period', ms(recent.period_ms), slowest],
    ['latency', 'Latency', ms(recent.latency_ms), `99 %: ${ms(recent.latency_p99_ms)}, longest ${ms(recent.latency_max_ms)}`],
    ['added', 'Added by the pipeline', ms(recent.added_latency_ms), `99 %: ${ms(recent.added_latency_p99_ms)}`],
    ['chunks', 'Chunks', count(totals.chunks), `${count(recent.in_flight)} of ${count(job.depth)} in flight`],
    ['queues', 'Queues', queues, 'before the source / behind the sink'],
    ['late', 'Late', count(totals.late), `held back ${ms(totals.held_back_ms)}`, totals.late > 0],
    ['dropped', 'Frames dropped', count(totals.skipped_frames), `${count(totals.dropped)} chunks overtaken by cuts`, totals.dropped + totals.skipped_frames > 0],
    ['saved', 'Steps saved', count(totals.steps_saved), ''],
    ['restarted-times', 'Restarts', count(totals.restarts), `of ${count(job.restarts_allowed)} allowed`, totals.restarts > 0],
  ];
  if (training) {
    rows.unshift(['loss', 'Loss', known(training.loss, (v) => v.toPrecision(4)), `step ${count(training.steps)}`],
      ['bubble', 'Bubble', percent(training.bubble), training.schedule]);
  }
  if (totals.lost_records > 0) rows.push(['unseen', 'Not seen', count(totals.lost_records), 'chunks that these figures miss', true]);
  $('figures').replaceChildren(...rows.map(([id, name, value, note, isBad]) => node('div', { id, ...(isBad ? { class: 'bad' } : {}) },
    node('dt', {}, name), node('dd', {}, value, node('small', {}, note)))));
};

const share = (value) => {
  const bar = node('span');
  bar.style.width = percent(Math.min(1, Math.max(0, value || 0))).replace(' ', '');
  return [node('span', { class: 'share' }, bar), percent(value)];
};
const fill = (table, heads, rows) => $(table).replaceChildren(
  node('tr', {}, ...heads.map((head) => node('th', { scope: 'col' }, head))),
  ...rows.map((row) => node('tr', {}, ...row.map((cell) => node('td', {}, ...[cell].flat())))));
const showTables = (seen) => {
  const device = (rank) => (rank.device_total_bytes === null ? '' : ` · ${bytes(rank.device_free_bytes)} of ${bytes(rank.device_total_bytes)} free`);
  fill('ranks', ['Rank', 'Idle', 'Waiting', 'Memory', 'Device'], seen.ranks.map((rank) => [
    String(rank.rank), share(rank.idle_share), count(rank.queued), bytes(rank.resident_bytes), `${rank.device || NONE}${device(rank)}`]));
  fill('stages', ['Stage', 'Ranks', 'Work', 'Wait', 'Idle'], seen.stages.map((stage) => [
    stage.stage, stage.ranks.join(', '), ms(stage.work_ms), ms(stage.idle_ms), percent(stage.idle_share)]));
  $('restarted').hidden = seen.restarts.length === 0;
  $('restarts').replaceChildren(...seen.restarts.map((restart) => {
    const served = restart.served_ns === null ? 'not served again yet' : `served again after ${ms((restart.served_ns - restart.lost_ns) / 1e6)}`;
    return node('li', {}, `${restart.sentence} (${served})`);
  }));
};

// The stages of each rank, a row for each, and below them what is between ranks.
const mark = (ns) => (ns === 0 ? '0' : ns >= 1e9 ? `${ns / 1e9} s` : ns >= 1e6 ? `${ns / 1e6} ms` : `${ns / 1e3} µs`);
const lanes = (seen, chunks) => {
  const all = [];
  const between = ['stage0', 'stage1', 'stage2', 'stage3'];
  const last = seen.stages.length - 1;
  for (const rank of seen.ranks) {
    seen.stages.forEach((stage, at) => {
      if (!stage.ranks.includes(rank.rank)) return;
      const bars = chunks.filter((chunk) => chunk.stages[at]).map((chunk) => ({
        chunk: chunk.chunk_index, from: chunk.stages[at][0], to: chunk.stages[at][1],
        kind: at === 0 ? 'source' : chunk.dropped ? 'dropped' : at === last ? 'sink' : between[(at - 1) % 4] }));
      all.push({ name: stage.stage, note: `rank ${rank.rank}`, rank: rank.rank, bars, height: 30 });
    });
    seen.stages.forEach((stage, at) => {
      if (at === 0 || seen.stages[at - 1].ranks[0] !== rank.rank || stage.ranks[0] === rank.rank) return;
      const bars = chunks.filter((chunk) => chunk.stages[at - 1] && chunk.stages[at]).map((chunk) => ({
        chunk: chunk.chunk_index, from: chunk.stages[at - 1][1], to: chunk.stages[at][0], kind: 'edge' }));
      all.push({ name: `${rank.rank} → ${stage.ranks[0]}`, note: '', rank: null, bars, height: 14 });
    });
  }
  return all;
};
const TICKS = [1, 2, 5].flatMap((step) => Array.from({ length: 14 }, (_, power) => step * 10 ** power)).sort((a, b) => a - b);
const showTimeline = (seen) => {
  const width = Math.max(280, $('timeline').clientWidth);
  const left = width < 640 ? 0 : 130;
  const chunks = seen.timeline.slice(-Math.max(8, Math.floor(width / 26)));
  const moments = chunks.flatMap((chunk) => chunk.stages.filter(Boolean).flat());
  if (moments.length === 0) return $('timeline').replaceChildren(node('p', { class: 'dim' }, 'No chunk is done yet.'));
  const [from, to] = [Math.min(...moments), Math.max(...moments)];
  const x = (at) => left + (width - left) * Math.min(1, Math.max(0, (at - from) / Math.max(1, to - from)));
  const svg = shape('svg', { role: 'img', 'aria-label': 'What each rank did with the last chunks' });
  const hatch = shape('pattern', { id: 'idle', width: 6, height: 6, patternUnits: 'userSpaceOnUse', patternTransform: 'rotate(45)' });
  hatch.append(shape('line', { class: 'hatch', x1: 0, y1: 0, x2: 0, y2: 6 }));
  svg.append(hatch);
  let y = 18;
  const tick = TICKS.find((step) => (to - from) / step <= (width - left) / 90) || TICKS.at(-1);
  const grid = shape('g');
  for (let at = 0; at <= to - from; at += tick) {
    if (x(from + at) < width - 44) grid.append(shape('text', { class: 'note', x: x(from + at) + 3, y: 11 }, mark(at)));
    grid.append(shape('line', { class: 'grid', x1: x(from + at), x2: x(from + at), y1: 0, y2: 4000 }));
  }
  const worked = {};
  const all = lanes(seen, chunks);
  for (const lane of all.filter((lane) => lane.rank !== null)) (worked[lane.rank] ||= []).push(...lane.bars);
  for (const lane of all) {
    if (left === 0) y += 15;
    svg.append(shape('rect', { class: 'row', x: left, y, width: width - left, height: lane.height, rx: 3 }));
    if (left === 0) {
      svg.append(shape('text', { x: 2, y: y - 3 }, lane.note === '' ? lane.name : `${lane.name} · ${lane.note}`));
    } else {
      const squeezed = lane.name.length > 18 ? { textLength: left - 12, lengthAdjust: 'spacingAndGlyphs' } : {};
      svg.append(shape('text', { x: left - 8, y: y + 12, 'text-anchor': 'end', ...squeezed }, lane.name));
      svg.append(shape('text', { class: 'note', x: left - 8, y: y + 25, 'text-anchor': 'end' }, lane.note));
    }
    if (lane.rank !== null) {
      let free = from;
      for (const bar of [...worked[lane.rank]].sort((a, b) => a.from - b.from)) {
        if (x(bar.from) - x(free) >= 1) svg.append(shape('rect', { class: 'idle', x: x(free), y: y + 3, width: x(bar.from) - x(free), height: lane.height - 6 }));
        free = Math.max(free, bar.to);
      }
    }
    for (const bar of lane.bars) {
      const long = Math.max(0.8, x(bar.to) - x(bar.from) - 0.8);
      const drawn = shape('rect', { class: bar.kind, x: x(bar.from), y: y + 3, width: long, height: lane.height - 6,
        'data-chunk': bar.chunk, 'data-from': bar.from, 'data-to': bar.to });
      drawn.append(shape('title', {}, `${lane.name}, chunk ${bar.chunk}: ${ms((bar.to - bar.from) / 1e6)}`));
      svg.append(drawn);
      if (bar.kind !== 'edge' && long > 4 + 7 * String(bar.chunk).length) {
        svg.append(shape('text', { class: 'number', x: x(bar.from) + long / 2, y: y + lane.height / 2 + 4 }, bar.chunk));
      }
    }
    y += lane.height + 6;
  }
  for (const restart of seen.restarts) {
    const served = restart.served_ns === null ? to : restart.served_ns;
    if (served < from || restart.lost_ns > to) continue;
    const band = shape('rect', { class: 'lost', x: x(restart.lost_ns), y: 15, width: Math.max(2, x(served) - x(restart.lost_ns)), height: y - 18 });
    band.append(shape('title', {}, restart.sentence));
    svg.append(band);
  }
  svg.setAttribute('height', y);
  svg.setAttribute('viewBox', `0 0 ${width} ${y}`);
  svg.prepend(grid);
  return $('timeline').replaceChildren(svg);
};

const showPicture = async (id, isThere) => {
  const canvas = $(id);
  canvas.parentElement.hidden = !isThere;
  if (!isThere) return;
  try {
    const picture = await createImageBitmap(await (await ask(`/thumb/${id}`)).blob());
    canvas.getContext('2d').drawImage(picture, 0, 0, canvas.width, canvas.height);
  } catch (error) {
    canvas.title = String(error); // The next one may come.
  }
};

let latest = null;
const draw = () => {
  showHead(latest);
  showFigures(latest);
  showTables(latest);
  showTimeline(latest);
};
const look = async () => {
  try {
    latest = await (await ask(latest ? '/next.json' : '/snapshot.json')).json();
    $('silent').hidden = true;
    draw();
    const [before, after] = latest.thumbnails;
    $('pictures').hidden = !before && !after;
    await Promise.all([showPicture('before', before), showPicture('after', after)]);
  } catch (error) {
    $('silent').hidden = false;
    $('silent').textContent = error instanceof TypeError
      ? 'Rank 0 does not answer: the job is over, or the way to it is broken. What is shown is the last that it said.' : error.message;
    if (!latest || !latest.ended) {
      $('state').textContent = 'no answer';
      $('state').className = 'state bad';
    }
  }
  if ((latest && latest.ended) || asked.has('still')) return;
  // An answer comes when it is time; after a failure this waits.
  setTimeout(look, $('silent').hidden && !document.hidden ? 0 : 1000);
};
$('report').addEventListener('click', async () => {
  try {
    const file = URL.createObjectURL(await (await ask('/report.json')).blob());
    node('a', { href: file, download: 'report-so-far.json' }).click();
    setTimeout(() => URL.revokeObjectURL(file), 10000);
  } catch (error) {
    $('silent').hidden = false;
    $('silent').textContent = error.message;
  }
});
addEventListener('resize', () => latest && showTimeline(latest));
look();
