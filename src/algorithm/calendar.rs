//! The calendar in UTC: when the day, the week and the month of an instant end.
//!
//! Dates are computed by Howard Hinnant's `days_from_civil` and `civil_from_days`
//! (<https://howardhinnant.github.io/date_algorithms.html>), for days since 1970-01-01 that are not
//! negative.

pub(super) const DAY_US: u64 = 86_400_000_000;

/// The end of the UTC day of `now_us`.
pub(super) const fn day_end(now_us: u64) -> u64 {
    (now_us / DAY_US + 1) * DAY_US
}

/// The end of the week of `now_us`, which begins on Monday, 00:00 UTC.
pub(super) const fn week_end(now_us: u64) -> u64 {
    // 1970-01-01 was a Thursday: three days into its week.
    let week = (now_us / DAY_US + 3) / 7;
    ((week + 1) * 7 - 3) * DAY_US
}

/// The end of the UTC month of `now_us`.
pub(super) const fn month_end(now_us: u64) -> u64 {
    let (year, month) = civil_month(now_us / DAY_US);
    let (year, month) = if month == 12 { (year + 1, 1) } else { (year, month + 1) };
    first_of_month(year, month) * DAY_US
}

/// The year and month of a day since 1970-01-01.
const fn civil_month(day: u64) -> (u64, u64) {
    let shifted = day + 719_468;
    let era = shifted / 146_097;
    let day_of_era = shifted % 146_097;
    let year_of_era =
        (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted_month = (5 * day_of_year + 2) / 153;
    // Years run from March to February here, so that the leap day comes last.
    let (month, carry) =
        if shifted_month < 10 { (shifted_month + 3, 0) } else { (shifted_month - 9, 1) };
    (year_of_era + era * 400 + carry, month)
}

/// The day since 1970-01-01 on which a month begins.
const fn first_of_month(year: u64, month: u64) -> u64 {
    let (year, shifted_month) = if month > 2 { (year, month - 3) } else { (year - 1, month + 9) };
    let era = year / 400;
    let year_of_era = year % 400;
    let day_of_year = (153 * shifted_month + 2) / 5;
    let day_of_era = year_of_era * 365 + year_of_era / 4 - year_of_era / 100 + day_of_year;
    era * 146_097 + day_of_era - 719_468
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The slow way: count every month from 1970 on.
    #[test]
    fn months_end_where_counting_days_says() {
        let mut day = 0;
        for year in 1970..2300_u64 {
            let leap = year % 4 == 0 && (year % 100 != 0 || year % 400 == 0);
            let february = if leap { 29 } else { 28 };
            for (month, days) in
                [31, february, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31].into_iter().enumerate()
            {
                let end = (day + days) * DAY_US;
                for instant in [day * DAY_US, day * DAY_US + 1, end - 1] {
                    assert_eq!(month_end(instant), end, "{year}-{}", month + 1);
                }
                day += days;
            }
        }
    }

    #[test]
    fn weeks_begin_on_monday() {
        // 1970-01-05 was the first Monday.
        assert_eq!(week_end(0), 4 * DAY_US);
        assert_eq!(week_end(4 * DAY_US - 1), 4 * DAY_US);
        assert_eq!(week_end(4 * DAY_US), 11 * DAY_US);
        // 2026-11-30 is a Monday.
        let monday = 1_796_000_000_000_000 / DAY_US * DAY_US;
        assert_eq!(week_end(monday), monday + 7 * DAY_US);
    }

    #[test]
    fn days_end_at_midnight() {
        assert_eq!(day_end(0), DAY_US);
        assert_eq!(day_end(DAY_US - 1), DAY_US);
        assert_eq!(day_end(DAY_US), 2 * DAY_US);
    }
}
