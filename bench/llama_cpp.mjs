// llama.cpp in `bench.llm`, by node-llama-cpp, whose package has libraries built for every CPU. Node runs this file with
// the folder of the installed package as its only argument. A job comes as JSON on standard input, and the runs leave
// as JSON on the last line, as `bench/llm_peers.py` describes them. Drafts are llama.cpp's own lookups in the prompt.
import {readFileSync} from "node:fs";
import {pathToFileURL} from "node:url";

const {getLlama, InputLookupTokenPredictor} = await import(pathToFileURL(`${process.argv[2]}/dist/index.js`));
const job = JSON.parse(readFileSync(0, "utf-8"));
const seconds = () => {
    const {user, system} = process.cpuUsage();
    return {cpu: (user + system) / 1e6, wall: performance.now() / 1e3};
};
const since = (begin, end) => ({cpu: end.cpu - begin.cpu, wall: end.wall - begin.wall});

async function decode(context, ids, length) {
    const predictor = length ? new InputLookupTokenPredictor({predictionLength: {max: length}}) : undefined;
    predictor?.updateInputTokens(ids);
    const sequence = context.getSequence({tokenPredictor: predictor});
    const tokens = [], begin = seconds();
    let first = begin;
    for await (const token of sequence.evaluate(ids, {temperature: job.temperature, topK: 50, yieldEogToken: true})) {
        tokens.push(token);
        if (tokens.length === 1) first = seconds();
        if (tokens.length === job.max_new_tokens || job.ends.includes(token)) break;
    }
    const total = since(begin, seconds()), passes = tokens.length - 1 - sequence.tokenPredictions.used;
    await sequence.dispose();
    return {tokens, first: 1, passes, prefill: since(begin, first), total};
}

const llama = await getLlama({gpu: false, build: "never", maxThreads: job.threads});
const model = await llama.loadModel({modelPath: job.model});
const contextSize = Math.max(...job.prompts.map(ids => ids.length)) + job.max_new_tokens + 16, runs = {};
for (const [name, length] of [["llama.cpp", 0], ["llama.cpp, prompt lookup", 10]]) {
    const context = await model.createContext({contextSize, threads: job.threads});
    await decode(context, job.prompts[0].slice(0, 16), length);
    runs[name] = [];
    for (const ids of job.prompts) runs[name].push(await decode(context, ids, length));
    await context.dispose();
}
console.log(JSON.stringify(runs));
process.exit(0);
