// Parses formulas in Markdown as extensions of micromark and mdast: \( \) and $ $ within a line,
// \[ \] and $$ $$ for display. A single dollar opens only before text, and closes only after text
// and not before a digit. Therefore "$5 and $10" are prices.

const BACKSLASH = 92;
const DOLLAR = 36;
const CLOSERS = { 40: 41, 91: 93 }; // ( [ after a backslash
const isLineEnding = (code) => code !== null && code < -2;
const isSpace = (code) => code === -2 || code === -1 || code === 32;
const isDigit = (code) => code >= 48 && code <= 57;

// Returns the syntax for one parse. The syntax remembers from where on no formula closes, so that
// unbalanced marks take linear time.
export function mathSyntax() {
  const text = { name: "mathText", tokenize: tokenizeText(new Map()) };
  const flow = { name: "mathFlow", tokenize: tokenizeFlow, concrete: true };
  return {
    flow: { [DOLLAR]: flow, [BACKSLASH]: flow },
    text: { [DOLLAR]: text, [BACKSLASH]: text },
  };
}

// Makes nodes of the types math (a block) and inlineMath: {value, isDisplay, isOpen}. The text
// contains no end of an open formula.
export function mathFromMarkdown() {
  function enter(type) {
    return function (token) {
      this.enter({ type, value: "", isDisplay: true, isOpen: true }, token);
    };
  }
  function exit(token) {
    const value = this.resume();
    Object.assign(this.stack.at(-1), { value: value.trim(), isOpen: !this.data.isMathClosed });
    this.data.isMathClosed = false;
    this.exit(token);
  }
  function opened(token) {
    this.stack.at(-1).isDisplay = !["$", "\\("].includes(this.sliceSerialize(token));
    this.buffer();
  }
  function closed() {
    this.data.isMathClosed = true;
  }
  function value(token) {
    this.config.enter.data.call(this, token);
    this.config.exit.data.call(this, token);
  }
  return {
    enter: { mathFlow: enter("math"), mathText: enter("inlineMath") },
    exit: { mathFlow: exit, mathText: exit, mathOpen: opened, mathClose: closed, mathValue: value },
  };
}

// Reads an opener, and passes the marks of its closer, {first, second, isSingle}, to `found`.
function opener(effects, type, found, nok) {
  return function start(first) {
    effects.enter(type);
    effects.enter("mathOpen");
    effects.consume(first);
    return function second(code) {
      const isDouble = first === DOLLAR && code === DOLLAR;
      if (first === BACKSLASH && !(code in CLOSERS)) return nok(code);
      const isSingle = first === DOLLAR && !isDouble;
      if (isSingle) {
        effects.exit("mathOpen");
        return found({ first, second: null, isSingle })(code);
      }
      effects.consume(code);
      effects.exit("mathOpen");
      return found({ first, second: isDouble ? DOLLAR : CLOSERS[code], isSingle });
    };
  };
}

// Reads the closer with `marks`, and then the text that `after` accepts.
function closer(marks, after) {
  return {
    partial: true,
    tokenize: (effects, ok, nok) =>
      function start(first) {
        effects.enter("mathClose");
        effects.consume(first);
        return function second(code) {
          if (marks.isSingle) {
            effects.exit("mathClose");
            return isDigit(code) ? nok(code) : ok(code);
          }
          if (code !== marks.second) return nok(code);
          effects.consume(code);
          effects.exit("mathClose");
          return after ? after(effects, ok, nok) : ok;
        };
      },
  };
}

// Reads blanks up to the end of the line.
function lineEnd(effects, ok, nok) {
  return function spaces(code) {
    if (code === null || isLineEnding(code)) return ok(code);
    if (!isSpace(code)) return nok(code);
    effects.enter("whitespace");
    return (function more(next) {
      if (isSpace(next)) {
        effects.consume(next);
        return more;
      }
      effects.exit("whitespace");
      return spaces(next);
    })(code);
  };
}

// Collects the text of a formula. A code after a backslash belongs to the backslash.
function content(effects) {
  const state = { isIn: false, previous: null, isEscaped: false };
  state.leave = () => {
    if (state.isIn) effects.exit("mathValue");
    state.isIn = false;
  };
  state.take = (code) => {
    if (!state.isIn) effects.enter("mathValue");
    state.isIn = true;
    effects.consume(code);
    state.isEscaped = code === BACKSLASH && !state.isEscaped;
    state.previous = code;
  };
  state.takeLineEnding = (code) => {
    state.leave();
    effects.enter("lineEnding");
    effects.consume(code);
    effects.exit("lineEnding");
    state.isEscaped = false;
    state.previous = code;
  };
  return state;
}

function tokenizeText(hopeless) {
  return function (effects, ok, nok) {
    const self = this;
    const from = self.now().offset;
    const text = content(effects);
    return opener(effects, "mathText", opened, nok);

    function opened(marks) {
      const kind = marks.isSingle ? "$" : String(marks.second);
      const close = closer(marks);
      return function first(code) {
        const known = hopeless.get(kind);
        if (known && known.from <= from && from < known.to) return nok(code);
        if (
          marks.first === DOLLAR &&
          (code === DOLLAR || (marks.isSingle && (isSpace(code) || isLineEnding(code))))
        )
          return nok(code);
        return between(code);
      };
      function between(code) {
        if (code === null) {
          hopeless.set(kind, { from, to: self.now().offset });
          return nok(code);
        }
        if (isLineEnding(code)) {
          text.takeLineEnding(code);
          return between;
        }
        if (code !== marks.first || text.isEscaped) return inside(code);
        text.leave();
        if (!marks.isSingle) return effects.attempt(close, done, inside)(code);
        return isSpace(text.previous) || isLineEnding(text.previous)
          ? nok(code)
          : effects.attempt(close, done, nok)(code);
      }
      function inside(code) {
        text.take(code);
        return between;
      }
    }

    function done(code) {
      effects.exit("mathText");
      return ok(code);
    }
  };
}

// Reads a formula from the start of a line to a closer at the end of a line. A blank line or the
// end of the surrounding block leaves the formula open.
function tokenizeFlow(effects, ok, nok) {
  const self = this;
  const text = content(effects);
  let isFirstLine = true;
  return opener(effects, "mathFlow", opened, nok);

  function opened(marks) {
    if (marks.isSingle || marks.second === CLOSERS[40]) return nok; // formulas within a line
    const whole = closer(marks, lineEnd);
    const any = closer(marks);
    return between;

    function between(code) {
      if (code === null || (isLineEnding(code) && self.interrupt)) return done(code);
      if (isLineEnding(code)) {
        text.leave();
        isFirstLine = false;
        return effects.attempt(nextLine, lineStart, done)(code);
      }
      if (code !== marks.first || text.isEscaped) return inside(code);
      text.leave();
      return effects.attempt(whole, done, notWhole)(code);
    }
    function notWhole(code) {
      return isFirstLine ? effects.check(any, nok, inside)(code) : inside(code);
    }
    function lineStart(code) {
      return code === null || isLineEnding(code) ? done(code) : between(code);
    }
    function inside(code) {
      text.take(code);
      return between;
    }
  }

  function done(code) {
    text.leave();
    effects.exit("mathFlow");
    return ok(code);
  }
}

const nextLine = {
  partial: true,
  tokenize(effects, ok, nok) {
    const self = this;
    return (code) => {
      effects.enter("lineEnding");
      effects.consume(code);
      effects.exit("lineEnding");
      return (next) => (self.parser.lazy[self.now().line] ? nok(next) : ok(next));
    };
  },
};
